"""Variables by which ranks know who they are: no overlay may set them. Pure."""

from __future__ import annotations

import re

_NAME = r"HPX_\w+|PET_\w+|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(?:ADDR|PORT)"
_ASSIGNED = re.compile(rf"(?<![\w$])(?:{_NAME})\+?=|\b(?:unset|read|readonly)\b[^;&|]*\b(?:{_NAME})\b")


def is_of_ranks(name: str) -> bool:
    """Whether a variable tells ranks who they are, or our runtime what it does."""
    return re.fullmatch(_NAME, name) is not None


def changes_ranks(line: str) -> bool:
    """Whether a line of shell sets or unsets such a variable."""
    return _ASSIGNED.search(line) is not None
