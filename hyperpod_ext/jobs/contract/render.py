"""Renders templates with Jinja. An undefined name in a template is an error, not an empty string."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import subprocess
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PackageLoader,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
)

from hyperpod_ext.errors import ConfigError, HyperpodExtError, NotFoundError, Problem

_own: ContextVar[Path | None] = ContextVar("own_templates", default=None)


def render(template: str, **values: object) -> str:
    """Return the text of `template` (a path below the templates folder) filled with `values`.

    Raises:
        ConfigError: a template of the user cannot be filled.
    """
    environment = _environment(_own.get())
    try:
        return environment.get_template(template).render(**values)
    except TemplateError as error:
        folder = _own.get()
        if folder is None or not (folder / template).is_file():
            raise
        line = error.lineno if isinstance(error, TemplateSyntaxError) else None
        hint = f"`hp-ext templates show {template}` shows the original"
        problem = Problem(f"cannot be filled: {error.message}", source=str(folder / template), line=line, hint=hint)
        raise ConfigError([problem]) from error


@contextlib.contextmanager
def own_templates(folder: Path | None) -> Iterator[None]:
    """Within this `with` block, use templates in `folder` instead of shipped templates with the same names.

    Args:
        folder: folder of the user's own templates; None: only shipped templates are used.

    Raises:
        NotFoundError: `folder` does not exist.
    """
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder}", hint=f"create it with `hp-ext templates eject {folder}`")
    token = _own.set(folder)
    try:
        yield
    finally:
        _own.reset(token)


def template_names() -> list[str]:
    """Return the names of all shipped templates."""
    return sorted(name for name in _shipped().list_templates() if name.endswith(".j2"))


def template_text(name: str) -> str:
    """Return the text of a shipped template."""
    return _shipped().get_source(Environment(), name)[0]


def parse_template(text: str) -> None:
    """Raise TemplateSyntaxError if `text` is not a valid Jinja template."""
    _environment(None).parse(text)


def _shipped() -> PackageLoader:
    return PackageLoader("hyperpod_ext.templates", "")


def _loader(folder: Path | None) -> BaseLoader:
    return _shipped() if folder is None else ChoiceLoader([FileSystemLoader(folder), _shipped()])


@functools.cache
def _environment(folder: Path | None) -> Environment:
    environment = Environment(
        loader=_loader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=_is_page,  # autoescape applies to HTML; the filters below escape shell and YAML
    )
    environment.filters["json"] = json.dumps
    environment.filters["quote"] = shlex.quote
    environment.filters["yaml"] = _yaml
    return environment


def _is_page(template: str | None) -> bool:
    return template is not None and template.endswith(".html.j2")


def _yaml(data: object, indent: int = 0) -> str:
    from hyperpod_ext.jobs.contract.yaml_text import to_yaml

    return to_yaml(data, indent)


def check_shell(name: str, text: str) -> None:
    """Raise an error if the shell cannot parse `text`, the rendered file `name`. No command of the text is run."""
    parsed = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    if parsed.returncode != 0:
        raise HyperpodExtError(
            f"the rendered {name} is not valid shell: {parsed.stderr.strip()}",
            hint="the template has an error: `hp-ext render` shows the text",
        )
