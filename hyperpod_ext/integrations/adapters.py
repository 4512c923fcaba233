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
    """Refuse to combine two kinds of adapter in `run`. Warn if the version of the library `package` was not tested.

    Raises:
        JobFailedError: the training function has already made an adapter of another kind in this call.
    """
    generation, other = _made.get(run, (0, name))
    if generation == run.generation and other != name:
        raise JobFailedError(
            f"{name} was made after {other} in one job: each of them restores the state and counts the steps",
            hint="Use one kind of adapter in a job. Train with the other one in a second job.",
        )
    _made[run] = run.generation, name
    if package is not None:
        warn_if_untried(package, importlib.metadata.version(package))
