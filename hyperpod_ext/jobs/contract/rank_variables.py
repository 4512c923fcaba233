"""Environment variables that identify ranks. Neither a spec nor an overlay may set them. Pure."""

from __future__ import annotations

import re

_NAME = r"HPX_\w+|PET_\w+|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(?:ADDR|PORT)"
_ASSIGNED = re.compile(rf"(?<![\w$])(?:{_NAME})\+?=|\b(?:unset|read|readonly)\b[^;&|]*\b(?:{_NAME})\b")

NODES_OF_OPERATOR = "NNODES"
"""Reserved only under HyperPod's operator: no other launcher reads it."""


def is_of_ranks(name: str) -> bool:
    """Return whether a variable identifies ranks or configures our runtime."""
    return re.fullmatch(_NAME, name) is not None


def changes_ranks(line: str) -> bool:
    """Return whether a line of shell sets or unsets a variable of ranks."""
    return _ASSIGNED.search(line) is not None
