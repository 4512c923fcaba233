"""Words for torchrun and hyperpodrun: `$` in arguments, which they take for a macro, and the rank before lines."""

from __future__ import annotations

from collections.abc import Iterable

RANKED_LINES = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank} | "}
"""Has both launchers put the rank before each line of a worker that they print with `--tee`."""


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Script and arguments so that they reach the script as they were written.

    Both launchers put their arguments through `string.Template`, for `${local_rank}`: it reads `$$` as one `$`.
    """
    return [word.replace("$", "$$") for word in words]
