"""Find state that changes from step to step and is in no snapshot: a new process after a fault would reset the state.

Each process reads the values of its objects before its first step, after the first and after the second step, and
compares the values. A process that replaces another process after the second step makes no comparison. A changed object
causes an error if its type is always training state, and a warning if its type is probably training state. Objects that
only describe training, such as a list of losses, are recorded in the event log, and named in the report after a fault.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.events.report import GIVE_A_GENERATOR, unseeded_text
from hyperpod_ext.runtime.state.unsaved import generators
from hyperpod_ext.runtime.state.unsaved.carried import is_attribute_carried, is_only_set, neighbours
from hyperpod_ext.runtime.state.unsaved.definitions import first_set
from hyperpod_ext.runtime.state.unsaved.fingerprints import address_of, end_look, of_tensor
from hyperpod_ext.runtime.state.unsaved.kinds import Candidate, candidates, codes_of, is_descriptive
from hyperpod_ext.runtime.state.unsaved.library_objects import unseeded_loaders
from hyperpod_ext.runtime.state.unsaved.reachable import of_script, reachable, variables

_COMPARED = 2
"""Number of steps at the start of a process after which its objects are compared."""
_NAMED = 6


class UnsavedState:
    """Compares the objects that a training function can reach, before and after the first two steps of this process.

    Args:
        warn: writes a warning.
        recorded: called with three lists: the names of changed objects, the names of changed objects that only describe
            training, and the names of data loaders without a generator of their own.
    """

    def __init__(
        self,
        warn: Callable[[str], object] = sys.stderr.write,
        recorded: Callable[[list[str], list[str], list[str]], object] = lambda names, descriptive, unseeded: None,
    ) -> None:
        self._warn, self._recorded = warn, recorded
        self._left_out: list[Any] = []
        self._moments: list[dict[Hashable, Candidate]] = []
        self._loop: Callable[[], Iterator[int] | None] = lambda: None
        self._neighbours: list[Any] = []
        """Iterators that the training loop iterates together with `run.steps`."""

    @property
    def is_done(self) -> bool:
        return len(self._moments) == 1 + _COMPARED

    def _be_done(self) -> None:
        self._moments, self._neighbours = [{}] * (1 + _COMPARED), []

    def leave_out(self, objects: Iterable[Any]) -> None:
        """Ignore `objects` in comparisons: the script has declared that they need no snapshot."""
        self._left_out += objects

    def leave(self) -> None:
        """Release references to the script's objects at the end of a generation, for example to a loader."""
        self._left_out, self._neighbours = [], []

    @property
    def left_out(self) -> tuple[str, ...]:
        """Class names of the objects passed to `leave_out`, and the names that were passed instead of objects."""
        return tuple(sorted({each if isinstance(each, str) else type(each).__name__ for each in self._left_out}))

    def begin(self, loop: Callable[[], Iterator[int] | None] = lambda: None) -> None:
        """Start the comparisons, before the first step. A later call starts the comparisons again, unless all of them
        are done.

        Args:
            loop: returns the iterator of `run.steps`, or None, and does not keep the iterator alive.
        """
        if not self.is_done:
            self._moments, self._loop, self._neighbours = [], loop, []

    def leave_to_others(self, step: int) -> None:
        """Skip the comparison in a process that replaces another process after `step`.

        The processes that ran the first two steps have already compared their objects. A comparison in the new process
        would take time, and all other ranks would wait for the new process.
        """
        if step >= _COMPARED:
            self._be_done()

    def see(
        self, frame: FrameType | None, kept: Sequence[Any], saved: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Read the values of all reachable objects. After the second step, compare the values, and report changes.

        Call this before the first step and after each commit.

        Args:
            frame: the frame of the function with the training loop.
            kept: results of `run.keep`.
            saved: the objects passed to `run.restore`, by name.
            tensors: all tensors in the states of the saved objects.

        Raises:
            JobFailedError: training state changes from step to step and is in no snapshot.
        """
        if self.is_done or not (around := variables(frame)):
            return
        if not self._moments:  # call `neighbours` only once, because it walks all objects
            self._neighbours = neighbours(self._loop())
        roots = [*around, *((f"run.keep()[{index}]", value) for index, value in enumerate(kept))]
        with torch.no_grad():
            self._moments.append(candidates(frame, roots, self._neighbours, saved, tensors, self._left_out))
            end_look()
            if not self.is_done:
                return
            reached = list(reachable(roots, of_script))
            changed = _changed(self._moments, tensors, codes_of(frame, reached))
        self._be_done()
        named = [str(each) for each, _ in changed if each.severity != "error"]
        unseeded = unseeded_loaders(reached, saved.values())
        if named or unseeded:
            self._recorded(named, [str(each) for each, _ in changed if each.severity == "note"], unseeded)
        if unseeded:
            self._warn(f"hyperpod_ext: {unseeded_text(unseeded)} {GIVE_A_GENERATOR}\n")
        if warned := [each for each, _ in changed if each.severity == "warning"]:
            names = _listed([str(each) for each in warned])
            places = first_set({each.name: each.alive() for each in warned[:_NAMED]}, frame)
            self._warn(
                f"hyperpod_ext: {names} changed in the first two steps and is in no snapshot. If training depends on "
                "it, pass it to run.restore in an object with state_dict() and load_state_dict(). Otherwise, call "
                f"run.leave_out with the object or with its name.{places}\n"
            )
        if errors := [(each, part) for each, part in changed if each.severity == "error"]:
            names = _listed([f"{each.name} ({each.kind}{f', {part}' if part else ''})" for each, part in errors])
            places = first_set({each.name: each.alive() for each, _ in errors[:_NAMED]}, frame)
            first = errors[0][0].name.split("[")[0].split(".")[-1] or "state"
            raise JobFailedError(
                f"{names} changes from step to step and is in no snapshot: a new process after a fault would reset it",
                hint=f"Pass it to run.restore({first}=...) as an object with state_dict() and load_state_dict(). If "
                "the script itself sets it to its value at the step that run.restore returns, call run.leave_out(...) "
                f"with it.{places}",
            )


def _changed(
    moments: Sequence[Mapping[Hashable, Candidate]], tensors: Sequence[torch.Tensor], codes: Sequence[CodeType]
) -> list[tuple[Candidate, str]]:
    """Return the objects that still exist and whose values have changed, each with the name of a changed part.

    Args:
        moments: the candidates before the first step, after it, and after the second step.
        tensors: all tensors in snapshots.
        codes: the code of the script's functions.
    """
    start, before, now = moments
    copies: set[Hashable] | None = None
    found = []
    for key, candidate in now.items():
        parts = [part for part in _differing(before.get(key), candidate) if part in before[key].values]
        if candidate.twice:  # a part counts only if the first step has changed it, too
            parts = [part for part in parts if part in _differing(start.get(key), before.get(key))]
        if not parts:
            continue
        # ignore a module that copies saved state, because the script will make the copy again
        if isinstance(candidate.alive(), torch.nn.Module):
            if copies is None:
                copies = {of_tensor(tensor) for tensor in tensors if address_of(tensor)}
            parts = [part for part in parts if candidate.values[part] not in copies]
        if candidate.kind in generators.KINDS or isinstance(candidate.alive(), random.Random):
            parts = parts if generators.goes_on(before[key].values[""], candidate.values[""]) else []
        if parts and _may_be_results(parts[0], start.get(key), before[key], candidate, codes):
            candidate = replace(candidate, severity="note")
        if parts:
            found.append((candidate, parts[0]))
    return found


def _may_be_results(
    part: str, start: Candidate | None, before: Candidate, now: Candidate, codes: Sequence[CodeType]
) -> bool:
    """Return whether a changed part of a dict, list or module is probably a result of a step, such as an output.

    A part counts as a result if the script replaces it without reading its old value, or if the name of the dict, list
    or attribute describes results.
    """
    variable = now.name.rpartition(".")[2]
    if now.severity == "warning" and now.version is not None:
        is_in_place = before.version is not None and 0 <= before.version < now.version
        return not is_in_place and (is_descriptive(variable) or not is_attribute_carried(codes, variable))
    if now.severity != "warning" or not (now.doubtful or (now.items and start and part not in start.values)):
        return False
    if now.items and before.items and part in now.items and now.items[part] == before.items.get(part):
        return False
    return is_descriptive(variable) or is_only_set(codes, variable)


def _differing(before: Candidate | None, now: Candidate | None) -> list[str]:
    if before is None or now is None or before.alive() is None or before.alive() is not now.alive():
        return []
    return [part for part, value in now.values.items() if part not in before.values or before.values[part] != value]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
