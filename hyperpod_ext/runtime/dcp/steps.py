"""Steps and generations as a run under plain torchrun counts them. Pure: equal on every rank that is told the same."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

_STEP = re.compile(r"(?:.*[^0-9A-Za-z])?(?:step[-_]?)?(\d+)")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that `step_N` or `N` names, with or without directories before it.

    Raises:
        ConfigError: it names none.
    """
    match = _STEP.fullmatch(os.fspath(checkpoint_id).rstrip("/"))
    if match is None:
        raise ConfigError([Problem(f"checkpoint_id {os.fspath(checkpoint_id)!r} names no step", hint="`step_100`")])
    return int(match[1])


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether it is one that `step_of` can tell."""
    return _STEP.fullmatch(os.fspath(checkpoint_id).rstrip("/")) is not None


@dataclass(frozen=True, slots=True)
class Save:
    """One save, as every rank knows it."""

    step: int
    generation: int

    @property
    def save_id(self) -> str:
        return save_id_of(self.generation, self.step)


@dataclass(frozen=True, slots=True)
class Entry:
    """How a generation is entered."""

    base: int
    """It begins after this step: what older ones saved later is of a history that was given up."""
    drop: int | None
    """What can go at once: snapshots after this step. None: nothing, before its first save is whole."""


@dataclass(slots=True)
class SaveHistory:
    """What this run has loaded and saved.

    A generation is a history without a break. A new one begins with the first save, after a save that
    failed, and when the script goes back to a step that it has saved already.
    """

    generation: int = 0
    restored: int | None = None
    """Step that was loaded."""
    complete: int | None = None
    """Newest step that all ranks have saved."""
    torn: bool = False
    """The last save failed: some ranks may hold it, so its step must not be mistaken for the newest."""
    saves: int = 0
    """Saves of this generation that all ranks have made."""

    def needs_new(self, step: int) -> bool:
        return self.generation == 0 or self.torn or (self.complete is not None and step <= self.complete)

    def entry(self, step: int) -> Entry:
        """How to enter a new generation whose first save is of `step`."""
        base = self.complete if self.complete is not None else self.restored
        if base is None:
            return Entry(min(0, step - 1), None)
        return Entry(min(base, step - 1), base if base < step else None)

    def enter(self, generation: int) -> None:
        self.generation, self.torn, self.saves = generation, False, 0

    def loaded(self, step: int) -> None:
        """The state is that of `step` now; the next save begins a generation from there."""
        self.generation, self.restored, self.complete, self.torn, self.saves = 0, step, None, False, 0

    def saved(self, step: int, complete: bool) -> int:
        """A save has ended. Returns how many of its generation are complete by now."""
        self.torn = not complete
        if complete:
            self.complete = step
            self.saves += 1
        return self.saves
