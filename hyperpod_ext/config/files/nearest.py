"""The name somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `name`, or None when nothing is like it."""
    by_lower = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest(name: str, valid: Iterable[str]) -> str:
    """A hint: the nearest valid name, or all of them."""
    names = list(valid)
    found = nearest(name, names)
    return f"did you mean `{found}`?" if found else f"valid: {', '.join(names)}" if names else ""
