"""Steps and generations of a run under plain torchrun. Pure: the same calls give the same result on every rank."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

_STEP = re.compile(r"(?:.*[^0-9A-Za-z])?(?:step[-_]?)?(\d+)")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step N of a checkpoint id `step_N` or `N`, with or without directories before it.

    Raises:
        ConfigError: the id names no step.
    """
    match = _STEP.fullmatch(os.fspath(checkpoint_id).rstrip("/"))
    if match is None:
        raise ConfigError([Problem(f"checkpoint_id {os.fspath(checkpoint_id)!r} names no step", hint="`step_100`")])
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
    """Step after which the generation begins; later steps of older generations are abandoned."""
    drop: int | None
    """Snapshots after this step are dropped at once; None: none, before the first save is complete."""


@dataclass(slots=True)
class SaveHistory:
    """The loads and saves of this run.

    The steps of a generation only increase. A new generation begins with the first save, after a failed save, and when
    the script goes back to a step that it has saved already.
    """

    generation: int = 0
    restored: int | None = None
    """Loaded step."""
    complete: int | None = None
    """Newest step saved by all ranks."""
    torn: bool = False
    """Whether the last save failed: some ranks may have it, so its step must not count as the newest."""
    saves: int = 0
    """Number of this generation's saves that are complete on all ranks."""

    def needs_new(self, step: int) -> bool:
        return self.generation == 0 or self.torn or (self.complete is not None and step <= self.complete)

    def entry(self, step: int) -> Entry:
        """Return the start of a new generation with `step` as its first save."""
        base = self.complete if self.complete is not None else self.restored
        if base is None:
            return Entry(min(0, step - 1), None)
        return Entry(min(base, step - 1), base if base < step else None)

    def enter(self, generation: int) -> None:
        self.generation, self.torn, self.saves = generation, False, 0

    def loaded(self, step: int) -> None:
        """Record that `step` was loaded; the next save begins a generation after it."""
        self.generation, self.restored, self.complete, self.torn, self.saves = 0, step, None, False, 0

    def saved(self, step: int, complete: bool) -> int:
        """Record the end of a save; return the number of complete saves of the generation."""
        self.torn = not complete
        if complete:
            self.complete = step
            self.saves += 1
        return self.saves
