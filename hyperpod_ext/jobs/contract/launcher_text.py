"""Arguments and settings for torchrun and hyperpodrun: escaped `$`, and log lines prefixed with the rank."""

from __future__ import annotations

from collections.abc import Iterable

from hyperpod_ext.config.job.job import JobConfig

RANKED_LINES = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank} | "}
"""Makes both launchers prefix each line of a worker with its rank under `--tee`."""


def without_launcher(job: JobConfig) -> bool:
    """Return whether each node runs the command itself, without torchrun, so that a launcher in the command can use the
    port."""
    return job.command is not None and job.workers_per_node == 1 and job.elastic is None


def words_for_torchrun(job: JobConfig) -> tuple[list[str], list[str]]:
    """Return further flags for the launcher, and the words of the program to start."""
    if job.command is None:
        return [], for_torchrun(job.words)
    program, *rest = job.words
    return ["--no-python"], [program, *for_torchrun(rest)]


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Escape `$` in the script and its arguments.

    Both launchers pass arguments through `string.Template`, for `${local_rank}`. The template turns `$$` into `$`.
    """
    return [word.replace("$", "$$") for word in words]
