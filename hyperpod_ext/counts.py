"""Numbers with their nouns, for messages."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    """Return a number with the noun `what` (in the singular), such as `1 file` or `2 files`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
