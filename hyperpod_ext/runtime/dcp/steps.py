"""Steps and generations of saves under plain torchrun.

These classes do no I/O, so that equal calls on all ranks give equal results.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

_STEP = re.compile(r"(?:.*[^0-9A-Za-z])?(?:step[-_]?)?(\d+)")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step N of a checkpoint id `step_N` or `N`, which may be the last part of a path.

    Raises:
        ConfigError: the id does not end with a step number.
    """
    match = _STEP.fullmatch(os.fspath(checkpoint_id).rstrip("/"))
    if match is None:
        raise ConfigError(
            [
                Problem(
                    f"checkpoint_id {os.fspath(checkpoint_id)!r} does not end with a step number",
                    hint="write, for example, `step_100`",
                )
            ]
        )
    return int(match[1])


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether `step_of` accepts this checkpoint id."""
    return _STEP.fullmatch(os.fspath(checkpoint_id).rstrip("/")) is not None


@dataclass(frozen=True, slots=True)
class Save:
    """Step and generation of one save, the same on every rank."""

    step: int
    generation: int

    @property
    def save_id(self) -> str:
        return save_id_of(self.generation, self.step)


@dataclass(frozen=True, slots=True)
class Entry:
    """The start of a generation."""

    base: int
    """Step after which the generation begins. Later steps of older generations are no longer used."""
    drop: int | None
    """Snapshots of later steps than this are deleted at once; None: no snapshot is deleted until the first save is
    complete.
    """


@dataclass(slots=True)
class SaveHistory:
    """The loads and saves of this process, from which the generation of each save follows.

    Within a generation, each save has a later step than the save before it. A new generation begins with the first
    save, after a failed save, and when the script saves a step again.
    """

    generation: int = 0
    """Generation of the last save; 0: there is no save since the start or the last load."""
    restored: int | None = None
    """The step that was loaded last; None if no step was loaded."""
    complete: int | None = None
    """Newest step that all ranks have saved; None if there is none."""
    torn: bool = False
    """Whether the last save failed. Some ranks may have saved its step, which must not count as newest step."""
    saves: int = 0
    """Number of saves in this generation that all ranks have completed."""

    def needs_new(self, step: int) -> bool:
        return self.generation == 0 or self.torn or (self.complete is not None and step <= self.complete)

    def entry(self, step: int) -> Entry:
        """Return the start of a new generation whose first save is `step`."""
        base = self.complete if self.complete is not None else self.restored
        if base is None:
            return Entry(min(0, step - 1), None)
        return Entry(min(base, step - 1), base if base < step else None)

    def enter(self, generation: int) -> None:
        self.generation, self.torn, self.saves = generation, False, 0

    def loaded(self, step: int) -> None:
        """Record that `step` was loaded. The next save begins a new generation, which starts after `step`."""
        self.generation, self.restored, self.complete, self.torn, self.saves = 0, step, None, False, 0

    def saved(self, step: int, complete: bool) -> int:
        """Record the end of the save of `step`, and return the generation's number of complete saves.

        `complete`: whether all ranks have saved the step.
        """
        self.torn = not complete
        if complete:
            self.complete = step
            self.saves += 1
        return self.saves
