"""Words for torchrun and hyperpodrun: `$` in arguments, which they take for a macro, and the rank before lines."""

from __future__ import annotations

from collections.abc import Iterable

from hyperpod_ext.config.job.job import JobConfig

RANKED_LINES = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank} | "}
"""Has both launchers put the rank before each line of a worker that they print with `--tee`."""


def without_launcher(job: JobConfig) -> bool:
    """Whether the one process of each node is the command itself: a launcher of its own then has its port to itself."""
    return job.command is not None and job.workers_per_node == 1 and job.elastic is None


def words_for_torchrun(job: JobConfig) -> tuple[list[str], list[str]]:
    """Further flags of both launchers, and what they start."""
    if job.command is None:
        return [], for_torchrun(job.words)
    program, *rest = job.words
    return ["--no-python"], [program, *for_torchrun(rest)]


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Script and arguments so that they reach the script as they were written.

    Both launchers put their arguments through `string.Template`, for `${local_rank}`: it reads `$$` as one `$`.
    """
    return [word.replace("$", "$$") for word in words]
