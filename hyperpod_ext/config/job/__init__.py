"""One job as its user writes it.

    from hyperpod_ext.config.job import JobConfig

Loaded on first use: what a container needs of a job is in `runtime`, a small part of this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.config.job.job import JobConfig as JobConfig

__all__ = ["JobConfig"]


def __getattr__(name: str) -> Any:
    if name != "JobConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.job").JobConfig
