"""Replacements for the logging functions of AWS's checkpointless training."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hyperpod_ext.compat.checkpointless.handlers import HPState
from hyperpod_ext.errors import ConfigError, Problem

__all__ = ["HPState", "debug_msg", "get_logger", "memory_status"]

_GIB, _KIB = 1 << 30, 1 << 10
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.FATAL,
    "off": logging.FATAL + 1,
}


def get_logger(name: str = "hp_wrapper") -> logging.Logger:
    """Return a logger that prints to stdout. The variable HPWRAPPER_LOG_LEVEL sets the logger's level (default: info).

    Raises:
        ConfigError: the level in HPWRAPPER_LOG_LEVEL is unknown.
    """
    logger, level = logging.getLogger(name), os.environ.get("HPWRAPPER_LOG_LEVEL", "info").lower()
    if level not in _LEVELS:
        raise ConfigError(
            [Problem(f"`{level}` is not a log level", "HPWRAPPER_LOG_LEVEL", hint=f"use one of {', '.join(_LEVELS)}")]
        )
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(levelname).1s %(filename)s:%(lineno)d] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(_LEVELS[level])
    return logger


def debug_msg(msg: object, rank: int | None = None, seq: object = None, steps: int = -1) -> str:
    """Return `msg` with a prefix that has the rank, the number of restarts, the step and the process ID.

    Args:
        msg: the message.
        rank: rank to print; None: this process's rank.
        seq: number of restarts to print; None: this job's number.
        steps: step to print.
    """
    rank = HPState().rank if rank is None else rank
    seq = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if seq is None else seq
    return f"[RANK:{rank}][SEQ:{seq}][STEPS:{steps}][PID:{os.getpid()}] {msg}"


def memory_status(
    tag: str = "", reset_max: bool = True, sync: bool = True, writers: Sequence[Any] = ()
) -> tuple[str, dict[str, float]]:
    """Return the memory use of this rank's GPU, as text and as numbers in GiB.

    Without a GPU, return the largest resident memory of this process instead.

    Args:
        tag: label for the text.
        reset_max: whether to reset the GPU's maximum values afterwards.
        sync: whether to wait for the GPU's queued work first.
        writers: objects with TensorBoard's `add_scalars`, which also get the numbers.
    """
    if torch.cuda.is_available():
        if sync:
            torch.cuda.synchronize()
        usage = {
            "allocated": torch.cuda.memory_allocated() / _GIB,
            "max_allocated": torch.cuda.max_memory_allocated() / _GIB,
            "max_reserved": torch.cuda.max_memory_reserved() / _GIB,
            "reserved": torch.cuda.memory_reserved() / _GIB,
        }
        if reset_max:
            torch.cuda.reset_peak_memory_stats()
    else:
        usage = {"max_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB}
    for writer in writers:
        writer.add_scalars(f"GPUMemoryGB/{tag}", usage, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    values = ", ".join(f"{name} {value:.4f}" for name, value in usage.items())
    return debug_msg(f"memory in GiB: {values} [{tag}]"), usage
