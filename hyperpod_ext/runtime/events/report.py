"""Makes a job's report from its event log: how the job spent its time, faults, recoveries, warnings. Pure functions.

Goodput is the share of wall time that was spent on steps that count. Wall time is from the start of the agents to the
end of the job. For an interrupted step, only its complete repetition counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hyperpod_ext.runtime.events.breakdown import breakdown
from hyperpod_ext.runtime.events.capacity import capacity_of, differences, find_continued, find_resizes
from hyperpod_ext.runtime.events.durable_steps import durable_steps, left_out
from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.of_checkpoints import Durable, SavesSetAside
from hyperpod_ext.runtime.events.of_faults import Aborted, Fault, FaultMissed, FaultOrdered, Injected, Killed
from hyperpod_ext.runtime.events.of_nodes import Network, NodeLost, RanksReassigned
from hyperpod_ext.runtime.events.of_training import (
    Begun,
    Done,
    Generation,
    Go,
    GroupsOpen,
    Imported,
    Joined,
    Metric,
    ParityShort,
    Restored,
    Skipped,
    Step,
    UnprotectedStep,
    Unsaved,
    WorkerStarted,
    count_sampled,
    is_sampled,
)
from hyperpod_ext.runtime.snapshot.parity import beyond_parity

_SHOWN = 8
"""Maximum number of ranks that one warning or recovery names."""
GIVE_A_GENERATOR = (
    "Give the loader generator=torch.Generator(). Random numbers that its worker processes draw must follow from the "
    "sample's index; ElasticDataLoader seeds them so."
)
OWN_LOSS = (
    "ranks logged different losses, and the loss that is shown is one rank's. Average it over the ranks before "
    "run.log, or log it as rank_loss."
)


def make_report(events: Events, *, state: str, error: Any, world_size: int) -> dict[str, Any]:
    """Return the job's report as a dict: the content of `report.json`."""
    recoveries = find_recoveries(events, world_size)
    intervals = kept_steps(events)
    seconds = account(events, intervals, recoveries)
    continued = find_continued(events, max(intervals, default=0))
    return {
        "state": state,
        "error": error,
        "world_size": world_size,
        "generations": max((event.generation for event in events.of(Generation)), default=0),
        "steps": max(intervals, default=0),
        "resumed_step": next((event.step for event in events.of(Go)), 0),
        "resumed_from": next((event.checkpoint for event in events.of(Go)), ""),
        "steps_lost": sum(recovery["steps_lost"] for recovery in recoveries),
        "goodput": round(seconds["steps"] / seconds["wall"], 4) if seconds["wall"] else 0.0,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "recoveries": recoveries,
        "resizes": find_resizes(events),
        "continued": continued,
        "network": {
            str(event.node): {"interface": event.interface, "address": event.address} for event in events.of(Network)
        },
        "nodes_lost": sorted({event.node for event in events.of(NodeLost)}),
        "spares": sorted(
            {event.node for event in events.of(Network)} - {event.node for event in events.of(WorkerStarted)}
        ),
        "faults": [{"t": round(fault.t - events.start, 4), **_shown(fault)} for fault in events.of(Fault)],
        "skipped": sorted({event.step for event in events.of(Skipped)}),
        "losses": {str(step): value for step, value in _losses(events).items()},
        "metrics": {name: value for event in events.of(Metric) for name, value in event.logged.items()},
        "differs_by_rank": (differs := _differs_by_rank(events)),
        "weights": _weights(events, world_size),
        "capacity": capacity_of(events),
        "pids": {str(event.rank): event.pid for event in events.of(Joined)},
        **breakdown(events, recoveries),
        "durable": durable_steps(events),
        "in_no_snapshot": (unsaved := in_no_snapshot(events)),
        "unseeded_loaders": (unseeded := unseeded_loaders(events)),
        "warnings": [
            *unprotected(events),
            *left_out(events),
            *differences(continued),
            *map(_beyond_parity, events.of(ParityShort)),
            *_of_disks(events),
            *(f"{event.text}." for event in events.of(SavesSetAside)[:_SHOWN]),
            *([_begun_anew(unsaved)] if unsaved and recoveries else []),
            *([f"{unseeded_text(unseeded)} {GIVE_A_GENERATOR}"] if unseeded else []),
            *([OWN_LOSS] if "loss" in differs else []),
            *map(_own_metric, _metrics_of_one_rank(events)),
            *_other_scripts(events),
            *dict.fromkeys(note for event in events.of(Imported) for note in event.notes),
            *map(_too_late, events.of(FaultMissed)),
            *_never_due(events),
        ],
    }


def _of_disks(events: Events) -> list[str]:
    """Return a sentence for each error of a disk that belongs to one node."""
    found = [(event.node, why) for event in events.of(Durable) if event.node is not None for why in event.problems]
    return list(dict.fromkeys(f"node {node}: {why}" for node, why in found))


def _other_scripts(events: Events) -> list[str]:
    """Return a warning if some rank started with a different version of the script."""
    started = [event for event in events.of(WorkerStarted) if event.script]
    others = list(dict.fromkeys(event.rank for event in started if event.script != started[0].script))
    if not others:
        return []
    shown = ", ".join(map(str, others[:_SHOWN])) + (" and others" if len(others) > _SHOWN else "")
    return [
        f"not all processes ran the same script: rank {shown} started with another version than rank "
        f"{started[0].rank}. The script was changed while the job ran, or differs between nodes."
    ]


def unprotected(events: Events) -> list[str]:
    """Return the warning about the first optimizer step that no snapshot saves; empty if there is no such step."""
    return [event.warning for event in events.of(UnprotectedStep)[:1]]


def in_no_snapshot(events: Events) -> list[str]:
    """Return the objects that changed from step to step although no snapshot contains them."""
    return list(dict.fromkeys(name for event in events.of(Unsaved) for name in event.objects))


def unseeded_loaders(events: Events) -> list[str]:
    """Return the DataLoaders that draw their seeds from torch's global generator."""
    return list(dict.fromkeys(name for event in events.of(Unsaved) for name in event.unseeded))


def unseeded_text(loaders: Sequence[str]) -> str:
    """Return a sentence about DataLoaders that have no generator."""
    has = "has" if len(loaders) == 1 else "have"
    return (
        f"{', '.join(loaders)} {has} no generator=: each iter() draws a seed from torch's global generator, so a step "
        "in which the loader begins again after a fault draws other random numbers."
    )


def _begun_anew(unsaved: Sequence[str]) -> str:
    return (
        f"no snapshot contains these, but they change from step to step: {', '.join(unsaved)}. After a fault, each "
        "has its value from the start, or from the moment of the fault."
    )


def _beyond_parity(event: ParityShort) -> str:
    return f"{beyond_parity(event.step, event.ranks)} All ranks continued from step {event.restored_step}."


def _too_late(event: FaultMissed) -> str:
    return f"{_not_injected(event)} {event.step}, but the rank was in step {event.at} when the order arrived."


def _never_due(events: Events) -> list[str]:
    """Return a sentence about each fault that was ordered for a step that the job did not reach."""
    newest = max((event.step for event in events.of(Step)), default=0)
    return [
        f"{_not_injected(event)} {event.step}, but the job made {newest} steps."
        for event in events.of(FaultOrdered)
        if event.step is not None and event.step > newest
    ]


def _not_injected(event: FaultMissed | FaultOrdered) -> str:
    return f"{event.kind} for rank {event.rank} was not injected: it was meant for step"


def kept_steps(events: Events) -> dict[int, tuple[float, float]]:
    """Return when each kept step began (on the first rank) and ended (on the last rank).

    A step that was repeated has the times of its last repetition."""
    intervals: dict[int, tuple[int, float, float]] = {}
    for made in events.of(Step):
        known = intervals.get(made.step)
        if known is None or made.generation > known[0]:
            intervals[made.step] = (made.generation, made.began, made.t)
        elif made.generation == known[0]:
            intervals[made.step] = (made.generation, min(known[1], made.began), max(known[2], made.t))
    return {step: (began, ended) for step, (_, began, ended) in sorted(intervals.items())}


def committed_step(events: Events, world_size: int) -> int:
    """Return the newest step that every sampled rank has made or restored in one generation; 0 if there is none."""
    ranks, sampled = dict[tuple[int, int], set[int]](), count_sampled(world_size)
    for event in events:
        if isinstance(event, Step | Begun) and is_sampled(event.rank):
            ranks.setdefault((event.step, event.generation), set()).add(event.rank)
    return max((step for (step, _), reported in ranks.items() if len(reported) == sampled), default=0)


def account(
    events: Events, intervals: dict[int, tuple[float, float]], recoveries: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Return the seconds that the job spent on start-up, steps, recovery and other work. These seconds add up to
    `wall`, the wall time of the job."""
    if not events:
        return {"startup": 0.0, "steps": 0.0, "recovery": 0.0, "other": 0.0, "wall": 0.0}
    start, end = events.start, events[-1].t
    began = min((event.t for event in events.of(Begun)), default=end)
    steps, covered = 0.0, start
    for step_began, step_ended in intervals.values():
        steps += max(0.0, step_ended - max(step_began, covered))
        covered = max(covered, step_ended)
    # the phase `first_new_step` of a recovery is a kept step, too: count its time only as time of steps
    recovery = sum(
        sum(v for k, v in r["phases"].items() if v is not None and k != "first_new_step") for r in recoveries
    )
    wall, startup = end - start, began - start
    return {
        "startup": startup,
        "steps": steps,
        "recovery": recovery,
        "other": max(0.0, wall - startup - steps - recovery),
        "wall": wall,
    }


def find_recoveries(events: Events, world_size: int) -> list[dict[str, Any]]:
    """Return one entry for each generation that began after a fault, with the seconds of each phase of the recovery."""
    bounds = [index for index, event in enumerate(events) if isinstance(event, Generation)] + [len(events)]
    parts = [Events(events[begins:ends]) for begins, ends in pairwise(bounds)]
    past = _Past(events.start, world_size, events[: bounds[0]])
    recoveries = []
    for leaving, joining in pairwise(parts):
        past.made(leaving)
        if leaving.of(Fault):
            recoveries.append(_recovery(past, leaving, joining))
        past.left(leaving)
    return recoveries


class _Past:
    """State of the job at the end of the generations that were passed to `made` and `left`."""

    def __init__(self, start: float, world_size: int, before: Iterable[Event]) -> None:
        self.start, self.world_size = start, world_size
        self.pids = {event.rank: event.pid for event in before if isinstance(event, Joined)}
        """Process id of each rank in the previous generation."""
        self.committed = 0
        """The newest step that every rank has made or restored since the last event `go`."""

    def made(self, generation: Events) -> None:
        """Add the steps of a generation that has ended."""
        begins = generation.of(Generation)[0]
        if (went_on := generation.last(Go)) is not None:
            self.committed = went_on.step
        self.committed = max(self.committed, committed_step(generation, begins.world_size or self.world_size))

    def left(self, generation: Events) -> None:
        """Record the process ids of a generation that has ended."""
        self.pids |= {event.rank: event.pid for event in generation.of(Joined)}


def _recovery(past: _Past, leaving: Events, joining: Events) -> dict[str, Any]:
    faults, begins = leaving.of(Fault), joining.of(Generation)[0]
    fault, went_on = faults[0], joining.last(Go)
    # prefer the step in the event `go`, because ranks may have refused the step in the event `generation`
    resumed = begins.step if went_on is None else went_on.step
    if {event.source for event in joining.of(Restored)} <= {"script", "fresh"} and (begun := joining.last(Begun)):
        resumed = begun.step  # a script that loads its own checkpoint chooses the step
    injected = _injected_at(leaving, {fault.rank for fault in faults}, fault.t)
    phases, seconds = _phases(leaving, joining, fault.t, injected, resumed)
    began = fault.t if injected is None else injected
    moved = [event.t for event in leaving if isinstance(event, Step | Begun) and event.t <= fault.t]
    staying = _staying(leaving, past.world_size)
    return {
        "generation": begins.generation,
        "t": round(began - past.start, 4),
        "fault": _shown(fault),
        "failed": list(dict.fromkeys(each.rank for each in faults))[:_SHOWN],
        "escalation_level": fault.escalation_level,
        "silent_s": round(fault.t - max(moved), 4) if moved else None,
        "resumed_step": resumed,
        # if the recovery was interrupted (no event `go`), the next recovery counts the lost steps
        "steps_lost": max(0, past.committed - resumed) if went_on is not None else 0,
        "source": _source(joining, fault.rank, staying),
        "survivor_pids_kept": _same_pids(past.pids, leaving, staying, fault.t),
        "phases": phases,
        "seconds": seconds,
    }


def _injected_at(leaving: Events, failed: set[int], seen: float) -> float | None:
    """Return when the fault was injected; None if the fault was not injected. `failed`: all ranks that failed, not only
    the first one."""
    injected = (event for event in leaving if isinstance(event, Killed | Injected))
    return next((event.t for event in injected if event.rank in failed and event.t <= seen), None)


def _phases(
    leaving: Events, joining: Events, seen: float, injected: float | None, resumed: int
) -> tuple[dict[str, float | None], float]:
    """Return the seconds of each phase in order, and their sum. The value is None for a phase that was not reached."""
    milestones = {
        "fault_seen": seen,
        "survivors_freed": _last(event.t for event in leaving.of(Aborted) if event.t >= seen),
        "new_member": _last(event.t for event in leaving.of(Joined) if event.t >= seen),
        "groups_back": _last(event.t for event in joining.of(GroupsOpen)),
        "state_back": _last(event.t for event in joining.of(Go)),
        "first_new_step": _last(event.t for event in joining.of(Step) if event.step == resumed + 1),
    }
    phases: dict[str, float | None] = {}
    began = reached = seen if injected is None else injected
    for name, moment in milestones.items():
        # if phases overlap, count the overlap only in the earlier phase
        phases[name] = None if moment is None else round(max(0.0, moment - reached), 4)
        reached = reached if moment is None else max(reached, moment)
    if injected is None:
        phases["fault_seen"] = None
    return phases, round(reached - began, 4)


def _last(moments: Iterable[float]) -> float | None:
    return max(moments, default=None)


def _shown(fault: Fault) -> dict[str, Any]:
    """Return the fields of a fault that the report shows."""
    return fault.model_dump(include={"rank", "node", "step", "cause", "phase", "kind"})


def _staying(leaving: Events, world_size: int) -> dict[int, int]:
    """Return the rank number in the next generation for each rank whose process survived, by its old number."""
    if reassigned := leaving.of(RanksReassigned):
        staying = {rank: rank for rank in reassigned[0].moved}
        for numbers in (each.moved for each in reassigned):
            staying = {rank: numbers[now] for rank, now in staying.items() if now in numbers}
        return staying
    gone = {fault.rank for fault in leaving.of(Fault) if fault.died}
    return {rank: rank for rank in range(world_size) if rank not in gone}


def _source(joining: Events, failed: int, staying: Mapping[int, int]) -> str:
    """Return the source from which the failed rank's state was restored; empty if no rank has restored.

    If the job continued without the failed rank, return the source of a rank that did not keep its own state.
    """
    sources = {event.rank: event.came_from for event in joining.of(Restored)}
    begins = joining.of(Generation)[0]
    if len(staying) == (begins.world_size or 0) and failed not in staying:
        return next((source for source in sources.values() if source != "self"), "self" if sources else "")
    return sources.get(staying.get(failed, failed), "")


def _same_pids(pids: Mapping[int, int], leaving: Events, stay: Mapping[int, int], seen: float) -> bool:
    """Return whether every surviving rank joined with the same process id as before the fault."""
    before = {**pids, **{event.rank: event.pid for event in leaving.of(Joined) if event.t < seen}}
    # ranks that are not sampled report only a new process or a new rank number
    now = {**before, **{event.rank: event.pid for event in leaving.of(Joined) if event.t >= seen}}
    return all(before.get(rank) == now.get(moved) for rank, moved in stay.items())


def _losses(events: Events) -> dict[int, float | None]:
    """Return the loss of each step, as reported by the lowest rank with a loss in the last repetition of the step."""
    best: dict[int, tuple[int, int, float | None]] = {}
    for made in events.of(Step):
        if "loss" in made.logged:
            entry = (-made.generation, made.rank, made.logged["loss"])
            best[made.step] = min(best.get(made.step, entry), entry, key=lambda known: known[:2])
    return {step: loss for step, (_, _, loss) in sorted(best.items())}


def _differs_by_rank(events: Events) -> list[str]:
    """Return the names of metrics whose values differ between ranks in the same step."""
    first: dict[tuple[int, int, str], float | None] = {}
    names = set()
    for made in events.of(Step):
        for name, value in made.logged.items():
            if first.setdefault((made.generation, made.step, name), value) != value:
                names.add(name)
    return sorted(names)


def _metrics_of_one_rank(events: Events) -> list[str]:
    """Return the names of metrics, logged outside of steps, whose values differ between ranks."""
    newest = {(name, event.rank): value for event in events.of(Metric) for name, value in event.logged.items()}
    values: dict[str, set[float | None]] = {}
    for (name, _), value in newest.items():
        values.setdefault(name, set()).add(value)
    return sorted(name for name, several in values.items() if len(several) > 1)


def _own_metric(name: str) -> str:
    return f"ranks logged different values of {name} for the whole run, and the one that is shown is one rank's."


def _weights(events: Events, world_size: int) -> str:
    """Return one digest for the final states of all ranks; empty unless every rank has reported its digest."""
    digests = {event.rank: event.digest for event in events.of(Done)}
    if len(digests) < world_size or not all(digests.values()):
        return ""
    if len(set(digests.values())) == 1:
        return next(iter(digests.values()))
    return "/".join(digests[rank] for rank in sorted(digests))
