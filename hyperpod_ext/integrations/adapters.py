"""Checks of a new adapter: no other kind in its run, and a tested version of its library."""

from __future__ import annotations

import importlib.metadata
import weakref

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.torch_requirements.tried_versions import warn_if_untried
from hyperpod_ext.runtime.training.run import Run

_made: weakref.WeakKeyDictionary[Run, tuple[int, str]] = weakref.WeakKeyDictionary()
"""Each run's newest adapter, with the generation that it was made in."""


def check_adapter(run: Run, name: str, package: str | None = None) -> None:
    """Refuse a second kind of adapter in `run`, and warn of an untested version of its library, `package`.

    Raises:
        JobFailedError: the training function has already made an adapter of another kind in this call.
    """
    generation, other = _made.get(run, (0, name))
    if generation == run.generation and other != name:
        raise JobFailedError(
            f"{name} and {other} were made for the same run: each of them restores the state and counts the steps",
            hint="Use one adapter in a job. A second trainer needs a job of its own.",
        )
    _made[run] = run.generation, name
    if package is not None:
        warn_if_untried(package, importlib.metadata.version(package))
