"""Arguments for torchrun and hyperpodrun with escaped `$`, and the setting that prefixes log lines with the rank."""

from __future__ import annotations

from collections.abc import Iterable

from hyperpod_ext.config.job.job import JobConfig

RANKED_LINES = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank} | "}
"""Environment variable with which torchrun and hyperpodrun, under `--tee`, prefix each log line with the worker's
rank."""


def without_launcher(job: JobConfig) -> bool:
    """Return whether each node runs the job's command directly, without torchrun.

    Without torchrun, the command can contain its own launcher, which can use the rendezvous port.
    """
    return job.command is not None and job.workers_per_node == 1 and job.elastic is None


def words_for_torchrun(job: JobConfig) -> tuple[list[str], list[str]]:
    """Return two lists of arguments for torchrun or hyperpodrun: extra flags, then the program with its arguments."""
    if job.command is None:
        return [], for_torchrun(job.words)
    program, *rest = job.words
    return ["--no-python"], [program, *for_torchrun(rest)]


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Escape `$` in the script and its arguments.

    torchrun and hyperpodrun replace `${local_rank}` in arguments with `string.Template`, which turns `$$` into `$`.
    """
    return [word.replace("$", "$$") for word in words]
