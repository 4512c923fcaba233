"""The one Jinja environment. A name that a template does not get is an error, never an empty string."""

from __future__ import annotations

import json
import shlex
import subprocess

from jinja2 import Environment, PackageLoader, StrictUndefined

from hyperpod_ext.errors import HyperpodExtError


def render(template: str, **values: object) -> str:
    """Fill `template`, a path below the templates folder."""
    return _environment().get_template(template).render(**values)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hyperpod_ext.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell and YAML, not HTML: the two filters below do it
    )
    environment.filters["json"] = json.dumps
    environment.filters["quote"] = shlex.quote
    return environment


def check_shell(name: str, text: str) -> None:
    """Have the shell parse `text` without running it: a rendered file is not used before it was read back."""
    parsed = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    if parsed.returncode != 0:
        raise HyperpodExtError(
            f"the rendered {name} is not valid shell: {parsed.stderr.strip()}",
            hint="this is a fault of the template: `hp-ext render` shows the text",
        )
