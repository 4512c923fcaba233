"""Words for torchrun and hyperpodrun, which take `$` in them for the beginning of a macro."""

from __future__ import annotations

from collections.abc import Iterable


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Script and arguments so that they reach the script as they were written.

    Both launchers put their arguments through `string.Template`, for `${local_rank}`: it reads `$$` as one `$`.
    """
    return [word.replace("$", "$$") for word in words]
