"""Measures how long a resize interrupts training, and whether ranks kept their processes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.runtime.events.capacity import unfinished_resize
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_training import Joined


class ResizeClock:
    """Measures the time from the last step in one rank assignment to the first step in the next rank assignment."""

    def __init__(self) -> None:
        self._under_way: dict[str, Any] | None = None
        """Fields of the newest `world` event, until a rank makes a step in the new rank assignment; None if no change
        is being measured."""
        self._last_step_at = 0.0
        self._pids: dict[int, int] = {}
        self._pids_before: dict[int, int] = {}
        self._pids_after: dict[int, int] = {}

    def reassigned(self, fields: Mapping[str, Any], moved: Mapping[int, int]) -> dict[str, Any] | None:
        """Start to measure the change to a new rank assignment.

        Args:
            fields: fields of the `world` event.
            moved: maps the old number of each rank that stays to its new number.

        Returns:
            The fields of a `resize_refused` event if this assignment replaces an ordered one in which no rank has made
            a step; otherwise None.
        """
        before = self._under_way
        self._under_way = {key: value for key, value in fields.items() if key != "moved"}
        self._pids_before = {now: self._pids[rank] for rank, now in moved.items() if rank in self._pids}
        self._pids, self._pids_after = {}, {}
        if before is None or not before["order"]:
            return None
        why = f"nodes were lost in the meantime; the job has {fields['nodes']}"
        return {"order": before["order"], "nodes": before["nodes"], "why": why}

    def resume(self, events: Events) -> None:
        """Continue a measurement that the former coordinator has begun, from the events of its log."""
        self._under_way, unfinished = None, unfinished_resize(events)
        for event in events:
            if isinstance(event, Joined):
                self.joined(event.rank, event.pid)
            elif event is unfinished:
                self._last_step_at = event.t
                self.reassigned(event.model_dump(exclude={"t", "event"}), unfinished.moved)

    def joined(self, rank: int, pid: int) -> bool:
        """Record that process `pid` of `rank` waits for a generation. Returns whether the rank has a new process."""
        is_new = self._pids.get(rank) != pid
        if self._under_way is not None and rank in self._pids_before:
            self._pids_after[rank] = pid
        self._pids[rank] = pid
        return is_new

    def stepped(self, generation: int, step: int, began: float, ended: float) -> dict[str, Any] | None:
        """Record a step of a rank. Returns the fields of the `resized` event if this is the first step in a new rank
        assignment, which ends the measurement; otherwise None."""
        resize = self._under_way
        if resize is None or generation < int(resize["generation"]):
            self._last_step_at = max(self._last_step_at, ended)
            return None
        self._under_way = None
        pause_s = round(max(0.0, began - self._last_step_at), 4)
        kept = self._pids_before == self._pids_after
        return {**resize, "step": step - 1, "pause_s": pause_s, "pids_kept": kept}
