"""Predicts the outcome of a job's next fault, with the same code that decides about recoveries in running jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from hyperpod_ext.config.checkpoint.tier import Loss
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.membership.actions import Fault
    from hyperpod_ext.runtime.membership.escalation import Budgets

Held = dict[str, Any]
"""State of one tier, with the keys `tier`, `kind`, `every_steps` or `every_s`, `newest_step` (the newest step that all
ranks have saved to the tier, or None) and `error` (a text or None)."""


def what_next(
    spec: Mapping[str, Any], held: Sequence[Held], running: bool, events: Events, now: float
) -> list[tuple[str, str]]:
    """Return descriptions of possible next faults, each with its expected outcome.

    Args:
        spec: the job's spec as JSON.
        held: state of each tier of the job.
        running: whether the job runs.
        now: present time, of the same clock as the times of the events.
    """
    from hyperpod_ext.config.checkpoint.tier import Loss

    newest = {lost: _newest(held, lost) for lost in get_args(Loss)}
    again = _from(
        newest["job"], "the job continues", "the job restarts from step 0, because no durable tier has a checkpoint"
    )
    if not running:
        return [("the job is started again", again)]
    following = _Next(spec, events, now)
    process, node = following.of_process(), following.of_node()
    if not process.startswith("the job ends"):
        process_from = _from(newest["process"], "all ranks continue", "all ranks restart from step 0")
        process += "; " + _state(events, spec["nodes"] * spec["workers_per_node"] > 1, process_from)
    if not node.startswith("the job ends"):
        anew = "all ranks restart from step 0, because no other node or tier has a copy"
        node += "; " + _state(events, spec["nodes"] > 1, _from(newest["node"], "all ranks continue", anew))
    return [("a process is killed", process), ("a node is lost", node), ("the job is started again", again)]


def _state(events: Events, others_live: bool, from_tier: str) -> str:
    """Return a description of where state is restored from: a live rank if ranks hold equal state, otherwise
    `from_tier`."""
    if not others_live:
        return from_tier
    from hyperpod_ext.runtime.events.of_training import Begun
    from hyperpod_ext.runtime.snapshot.sharing import Sharing

    begun = events.last(Begun)
    if begun is None or not begun.sharing:
        return f"from the state of a live rank if it has equal state, otherwise {from_tier}"
    sharing = Sharing.of(begun.sharing)
    if sharing.kind == "same" and sharing.ranks is None:
        return "from the state of a live rank, because all ranks hold equal state"
    return from_tier


class _Next:
    """Computes the outcome of the next fault of a running job, with the rules of the job's membership."""

    def __init__(self, spec: Mapping[str, Any], events: Events, now: float) -> None:
        from hyperpod_ext.runtime.events.report import committed_step

        from ..job_events import nodes_in

        self._spec, self._now = spec, now
        self._earlier, self._budgets = earlier_faults(events), _budgets(spec)
        self._spares = spares_left(spec, events)
        self._nodes = nodes_in(events).size or spec["nodes"]
        self._step = committed_step(events, self._nodes * spec["workers_per_node"]) + 1

    def of_process(self) -> str:
        from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fault
        from hyperpod_ext.runtime.membership.escalation import give_up, level_of

        fault = Fault(0, "killed by SIGKILL (9)", self._step, died=True, kind="signal", node=0, at=self._now)
        if (end := give_up(fault, self._earlier, self._budgets)) is not None:
            return f"the job ends: {end.message}"
        if level_of(fault, self._earlier, self._budgets) is EscalationLevel.NODE:
            often = f"processes on node 0 have died {self._budgets.max_on_node} times in a row (restart.max_on_node)"
            return f"on node 0 the node is replaced, because {often}; on other nodes the process is replaced"
        return "the process is replaced"

    def of_node(self) -> str:
        from hyperpod_ext.runtime.membership.actions import Fault
        from hyperpod_ext.runtime.membership.escalation import give_up

        spec = self._spec
        if spec["nodes"] + spec["spares"] == 1 and not spec["elastic"]:
            return "the job ends: it has no other node"
        why, last = "killed", self._nodes - 1
        rank = last * spec["workers_per_node"]
        fault = Fault(rank, why, self._step, died=True, kind="lost", node=last, node_lost=True, at=self._now)
        if (end := give_up(fault, self._earlier, self._budgets)) is not None:
            return f"the job ends: {end.message}"
        if self._spares:
            return "a spare node takes its place"
        if spec["elastic"]:
            return "the job continues with fewer nodes if `elastic` allows so few; otherwise it waits for another node"
        return f"the job waits up to {spec['restart']['node_wait_s']:g} s for another node"


def _newest(held: Sequence[Held], lost: Loss) -> Held | None:
    """Return the tier with the newest step among the tiers that survive the loss `lost`. None if no tier with a
    complete step survives the loss."""
    from hyperpod_ext.config.checkpoint import survivors

    kinds = survivors(lost)
    there = [one for one in held if one["kind"] in kinds and one["newest_step"] is not None]
    return max(there, key=lambda one: int(one["newest_step"]), default=None)


def _from(newest: Held | None, go_on: str, anew: str) -> str:
    return anew if newest is None else f"{go_on} from step {newest['newest_step']}, which is in {newest['tier']}"


def earlier_faults(events: Events) -> list[Fault]:
    """Return the faults since the start of the job. The loss of a node counts as one fault, although the event log may
    contain several events for the loss."""
    from hyperpod_ext.runtime.events import of_faults
    from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fault

    levels = {level.value: level for level in EscalationLevel}
    found: list[Fault] = []
    lost: set[tuple[int, float]] = set()
    for event in events.of(of_faults.Fault):
        is_loss = event.kind == "lost"
        if is_loss and (event.node, event.t) in lost:
            continue
        lost |= {(event.node, event.t)} if is_loss else set()
        fault = Fault(
            event.rank,
            event.cause,
            event.step,
            event.died,
            event.kind or "exception",
            node=event.node,
            node_lost=is_loss,
            at=event.t,
            level=levels.get(event.escalation_level),
            late=event.late,
        )
        found.append(fault)
    return found


def _budgets(spec: Mapping[str, Any]) -> Budgets:
    from hyperpod_ext.config.restart import RestartPolicy
    from hyperpod_ext.runtime.membership.escalation import Budgets

    return Budgets.of(RestartPolicy.model_validate_json(json.dumps(spec["restart"])))


def budgets_left(spec: Mapping[str, Any], events: Events, now: float) -> dict[str, Any]:
    """Return the numbers of further faults that the job can recover from, and the limits of the numbers.

    Args:
        now: present time, of the same clock as the times of the events.
    """
    budgets = _budgets(spec)
    counted = [fault for fault in earlier_faults(events) if not fault.follows]
    recent = sum(now - fault.at < budgets.window_s for fault in counted)
    window = budgets.max_restarts_in_window
    return {
        "restarts": max(0, budgets.max_restarts - len(counted)),
        "max_restarts": budgets.max_restarts,
        "restarts_in_window": None if window is None else max(0, window - recent),
        "window_s": budgets.window_s,
        "node_losses": max(0, budgets.max_node_losses - sum(fault.node_lost for fault in counted)),
        "max_node_losses": budgets.max_node_losses,
        "spares": spares_left(spec, events),
    }


def spares_left(spec: Mapping[str, Any], events: Events) -> int:
    """Return the number of idle spare nodes that the job has left."""
    from ..job_events import nodes_in

    known = nodes_in(events)
    return max(0, len(known.members) - known.size) if known.members else int(spec["spares"])
