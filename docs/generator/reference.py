"""All generated pages of the reference, and the places on the site of the names that pages mention."""

from __future__ import annotations

import re

from generator import api, commands, environment, fields, rules


def pages() -> dict[str, str]:
    """Return all generated pages of the reference, by their paths on the site."""
    return {
        **fields.pages(),
        **commands.pages(),
        "reference/rules.md": rules.rules_page(),
        "reference/exit-codes.md": rules.exit_codes_page(),
        "reference/environment.md": environment.page(),
        **api.pages(),
    }


def places(made: dict[str, str]) -> dict[str, str]:
    """Return the path and anchor on the site of each rule, command, variable and field, by its name.

    Args:
        made: the generated pages.
    """
    found = {"hp-ext": "reference/cli/index.md", "job.yaml": "reference/job/index.md"}
    found |= {"cluster.yaml": "reference/cluster/index.md"}
    found |= {f"hp-ext {name}": place for name, place in commands.commands().items()}
    found |= {name: place for name, place in fields.anchors().items() if name.count(".") >= 1}
    for path, mark in (("reference/rules.md", r"\{#(HPX\d{3})\}"), ("reference/environment.md", r'id="(HPX_\w+)"')):
        found |= {name: f"{path}#{name}" for name in re.findall(mark, made[path])}
    return found
