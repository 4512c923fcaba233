"""Converts a job's events to lines of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.counts import count
from hyperpod_ext.runtime.events import of_checkpoints, of_faults, of_nodes, of_training
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.reading import read_followed
from hyperpod_ext.runtime.events.report import OWN_LOSS, unseeded_text

_LONGEST_LINE = 160
_STEPS_COMPARED = 16
"""Number of newest steps whose losses are remembered, to compare the losses of different ranks."""


class EventText:
    """Tracks the progress of a run from its events, and returns lines of text for notable events."""

    def __init__(self, run: str = "main") -> None:
        self._begin(run)

    def _begin(self, run: str) -> None:
        self.run = run
        self.step = 0
        self.of: int | None = None
        self.loss: float | None = None
        self._faulty, self._went_on = False, False
        self._first_loss: dict[tuple[int, int], float | None] = {}
        """The loss that was logged first for each of the newest steps, by generation and step."""
        self._differs = False
        self._unprotected = False

    def tell(self, entry: Mapping[str, Any]) -> list[str]:
        """Process one event of the event log, and return its lines of text. `entry["run"]` is the name of the event's
        run."""
        lines = []
        if entry["run"] != self.run:
            self._begin(entry["run"])
            lines.append("the job runs again without faults, for comparison")
        event = read_followed(entry)
        if isinstance(event, of_training.Step):
            self._take_step(event)
            lines += self._of_one_rank(event)
        elif isinstance(event, of_training.Go) and self._faulty:
            lines.append(f"recovered: all ranks continue after step {event.step}")
        elif isinstance(event, of_training.Go) and event.step and not self._went_on:
            source = f"the checkpoint {event.checkpoint}" if event.checkpoint else "memory"
            lines.append(f"resumes an earlier run of this name after step {event.step}, from {source}")
        elif isinstance(event, of_training.UnprotectedStep):
            lines += [] if self._unprotected else [f"warning: {event.warning}"]
            self._unprotected = True
        elif event is not None:
            lines += _lines(event)
        if isinstance(event, of_faults.Fault | of_training.Go):
            self._faulty = isinstance(event, of_faults.Fault)
            self._went_on = self._went_on or not self._faulty
        return lines

    def _take_step(self, made: of_training.Step) -> None:
        self.of = made.of or self.of
        if made.step >= self.step:
            self.step = made.step
            self.loss = made.logged.get("loss", self.loss)

    def _of_one_rank(self, made: of_training.Step) -> list[str]:
        """Return a warning if ranks have logged different losses for the same attempt of a step, at most once for each
        run."""
        if self._differs or "loss" not in made.logged:
            return []
        making, loss = (made.generation, made.step), made.logged["loss"]
        first = self._first_loss.setdefault(making, loss)
        if len(self._first_loss) > _STEPS_COMPARED:
            self._first_loss.pop(next(iter(self._first_loss)))
        self._differs = first != loss
        return [f"warning: {OWN_LOSS}"] if self._differs else []


def _lines(event: Event) -> list[str]:
    """Return the lines of text for an event whose text does not depend on earlier events."""
    match event:
        case of_training.JobStarted():
            return [f"starting {count(event.world_size, 'rank')} on {count(event.nodes, 'node')}"]
        case of_training.Imported():
            return [f"warning: {note}" for note in event.notes]
        case of_training.Unsaved():
            names = [each for each in event.objects if each not in event.descriptive]
            shown = [f"changes between steps, but is in no snapshot: {', '.join(names)}"] if names else []
            return [*shown, *([unseeded_text(event.unseeded)] if event.unseeded else [])]
        case of_training.RestoreFailed():
            return [f"rank {event.rank} could not restore, and tries the next source: {event.error}"]
        case of_faults.Fault():
            what = "is gone" if event.died else "failed"
            return [f"rank {event.rank} {what} in step {event.step}: {_first_line(event.cause)}"]
        case of_faults.FaultMissed():
            return [
                f"{event.kind} for rank {event.rank} came too late for step {event.step}: the rank is in step "
                f"{event.at}"
            ]
        case of_nodes.MemoryLost() | of_nodes.ForkServerLost():
            what = f"node {event.node}: {_first_line(event.cause)}"
            return [f"{what}; it is started again, and training continues"]
        case of_nodes.NodeLost():
            return [f"node {event.node} is lost: {_first_line(event.cause)}"]
        case of_nodes.NodeReplaced():
            return [f"node {event.node} takes ranks {', '.join(map(str, event.ranks))}"]
        case of_nodes.AwaitingNode():
            what = f"waiting {event.seconds:g} s for another node in place of {event.node}"
            return [f"no spare is left; {what}"]
        case of_nodes.Coordinator():
            return [f"node {event.node} now coordinates the job"]
        case of_nodes.ResizeBegun():
            if event.of == event.nodes:  # a move, not a resize: a spare node replaces a node
                leaving, joining = (", ".join(map(str, nodes)) for nodes in (event.leaving, event.joining))
                return [f"the ranks of node {leaving} will move to node {joining}"]
            return [f"resizing from {event.of} to {count(event.nodes, 'node')}"]
        case of_nodes.ResizeRefused():
            return [f"the job is not resized: {_first_line(event.why)}"]
        case of_nodes.RejoinGivenUp():
            return [f"{event.missing} lost ranks are not replaced: {_first_line(event.why)}"]
        case of_nodes.Resized():
            what = f"continues with {count(event.nodes, 'node')} instead of {event.of} after step {event.step}"
            if event.cause == "move":
                what = f"continues with a spare in place of a node after step {event.step}"
            elif event.cause in ("continued", "rejoined"):
                what = f"continues with {event.world_size} of {event.full_size} ranks after step {event.step}"
            return [f"{what}, {event.pause_s:.2f} s without a step"]
        case of_checkpoints.SavesSetAside():
            return [event.text]
        case of_checkpoints.FinalSave(step=int(step)):
            return [f"step {step} goes to the durable tiers"]
        case of_checkpoints.Uploading():
            return [_still_to_come(event, tier) for tier in event.tiers if not tier.arrived]
    return []


def _still_to_come(event: of_checkpoints.Uploading, tier: of_checkpoints.LeftOver) -> str:
    """Return the line of text for a tier to which a part of the last step is not uploaded yet."""
    what = f"{tier.left_bytes / (1 << 20):.1f} MiB are left" if tier.left_ranks else "all bytes are sent"
    return f"node {event.node} uploads its part to {tier.tier}, for at most {event.seconds_left:.0f} s: {what}"


def _first_line(cause: str) -> str:
    line = cause.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..."
