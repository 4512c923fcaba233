"""Environment variables that identify ranks, such as RANK, and that neither specs nor overlays may set. Pure."""

from __future__ import annotations

import re

_NAME = r"HPX_\w+|PET_\w+|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(?:ADDR|PORT)"
_ASSIGNED = re.compile(rf"(?<![\w$])({_NAME})\+?=|\b(?:unset|read|readonly)\b[^;&|]*\b({_NAME})\b")

NODES_OF_OPERATOR = "NNODES"
"""Environment variable in which HyperPod's operator passes the number of nodes. Specs for HyperPod's operator may not
set NNODES; other launchers do not read NNODES."""


def is_of_ranks(name: str) -> bool:
    """Return whether the variable `name` identifies ranks or configures this project's runtime."""
    return re.fullmatch(_NAME, name) is not None


def refusal(name: str, done: str = "set") -> str:
    """Return the error message for a spec that changes the rank variable `name`. `done`: "set" or "removed"."""
    return f"{name} cannot be {done}, because the launcher sets it on each rank"


def changes_ranks(line: str) -> bool:
    """Return whether a line of a shell script sets or unsets a variable that identifies ranks."""
    return changed_variable(line) is not None


def changed_variable(line: str) -> str | None:
    """Return a variable that identifies ranks and that a line of a shell script sets or unsets; None if there is
    none."""
    found = _ASSIGNED.search(line)
    return (found[1] or found[2]) if found else None
