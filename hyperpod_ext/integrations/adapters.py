"""Checks of a new adapter: a job uses only one kind of adapter, and a tested version of the adapter's library."""

from __future__ import annotations

import importlib.metadata
import weakref

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.torch_requirements.tried_versions import warn_if_untried
from hyperpod_ext.runtime.training.run import Run

_made: weakref.WeakKeyDictionary[Run, tuple[int, str]] = weakref.WeakKeyDictionary()
"""Name of each run's newest adapter, with the generation in which the adapter was made."""


def check_adapter(run: Run, name: str, package: str | None = None) -> None:
    """Refuse to combine two kinds of adapters in `run`. Warn if the installed version of `package` was not tested.

    Args:
        run: the run that the adapter uses.
        name: name of the adapter's kind.
        package: distribution name of the adapter's library; None: the adapter needs no library.

    Raises:
        JobFailedError: the training function has already made an adapter of another kind in this call.
    """
    generation, other = _made.get(run, (0, name))
    if generation == run.generation and other != name:
        raise JobFailedError(
            f"{name} was created after {other} in one job, but both would restore the state and count the steps",
            hint="Use only one kind of adapter in a job.",
        )
    _made[run] = run.generation, name
    if package is not None:
        warn_if_untried(package, importlib.metadata.version(package))
