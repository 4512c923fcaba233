"""Chooses the escalation level at which a fault is handled, and decides whether the fault ends the job. Pure functions.

    in process ──▶ process ──▶ node ──▶ the job ends; a new start restores it from a durable tier

Each level has a budget of faults. When the budget of a level is used up, the next fault is handled at the next level.
Similar faults count together only if fewer than `calm_steps` training steps are between them. Without the limit
`calm_steps`, a long job would give up a node because of a few rare faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.detection.failure_causes import NO_PROGRESS
from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fail, Fault

_SAME_EXCEPTION = 2
"""Number of times in a row that an exception must be raised at the same step to end the job."""
_SAME_DEATH = 3
"""Number of times in a row that a rank's process must die in the same way at the same step to end the job."""
_SAME_HANG = 3
"""Number of times in a row that a rank must hang in the same phase, at any steps, to end the job."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The restart limits of a job. The fields are documented in `RestartPolicy`."""

    max_restarts: int
    max_restarts_in_window: int | None = None
    window_s: float = 3600.0
    max_in_process: int = 3
    max_on_node: int = 3
    max_node_losses: int = 3
    quarantine_after: int = 2
    calm_steps: int = 20

    @classmethod
    def of(cls, policy: RestartPolicy) -> Budgets:
        """Return the budgets of a restart policy."""
        return cls(**{field.name: getattr(policy, field.name) for field in fields(cls)})


def level_of(fault: Fault, earlier: Sequence[Fault], budgets: Budgets) -> EscalationLevel:
    """Return the escalation level at which to handle `fault`. `earlier`: all earlier faults of the job, oldest
    first."""
    if fault.node_lost:
        return EscalationLevel.NODE
    if fault.follows:
        return EscalationLevel.PROCESS
    if not fault.died:
        own = _streak(fault, earlier, budgets.calm_steps, lambda other: other.rank == fault.rank and not other.died)
        return EscalationLevel.IN_PROCESS if own <= budgets.max_in_process else EscalationLevel.PROCESS
    here = _streak(
        fault,
        earlier,
        budgets.calm_steps,
        lambda other: other.died and other.node == fault.node and other.node >= 0 and not other.follows,
    )
    return EscalationLevel.PROCESS if here <= budgets.max_on_node else EscalationLevel.NODE


def give_up(fault: Fault, earlier: Sequence[Fault], budgets: Budgets) -> Fail | None:
    """Return a `Fail` action if `fault` ends the job, or None if the job continues."""
    who = _who(fault)
    if fault.final:
        return Fail(fault.code, who, fault.hint)
    if fault.follows:
        return None
    everything, earlier = earlier, [other for other in earlier if not other.follows]
    same, most = _same(fault, everything, budgets)
    if not fault.node_lost and same >= most:
        hint = "The fault occurs each time, so a restart cannot help; the rank's log has the details."
        left = next(
            (f" Rank {other.rank} {other.cause}." for other in reversed(everything) if other.kind == "stuck"), ""
        )
        # a fault of kind `stalled` names no rank, so add the cause of a `stuck` rank, which names the line of the
        # script
        after = left if fault.kind == "stalled" else ""
        return Fail(fault.code, f"{who}; {same} times in a row{'.' if after else ''}{after}", fault.hint or hint)
    losses = sum(other.node_lost for other in earlier) + fault.node_lost
    if fault.node_lost and losses > budgets.max_node_losses:
        hint = "Raise restart.max_node_losses, or find out why nodes fail. " + _AGAIN
        message = f"{who}; this was node loss {losses}, and the limit is {budgets.max_node_losses}. "
        return Fail(fault.code, message + tried(everything), hint)
    count = len(earlier) + 1
    if count > budgets.max_restarts:
        hint = "Raise restart.max_restarts, or find out from the logs of the ranks why they fail."
        message = f"{who}; this was fault {count}, and the limit is {budgets.max_restarts}"
        return Fail(fault.code, f"{message}. {tried(everything)}" if earlier else message, hint)
    recent = 1 + sum(fault.at - other.at < budgets.window_s for other in earlier)
    if budgets.max_restarts_in_window is not None and recent > budgets.max_restarts_in_window:
        hint = "Raise restart.max_restarts_in_window, or find out from the logs of the ranks why they fail."
        recovers = f"and the limit is {budgets.max_restarts_in_window}"
        message = f"{who}; this was fault {recent} within {budgets.window_s:g} s, {recovers}. {tried(everything)}"
        return Fail(fault.code, message.rstrip(), hint)
    return None


def _same(fault: Fault, earlier: Sequence[Fault], budgets: Budgets) -> tuple[int, int]:
    """Return how many times in a row a fault has occurred, and how many occurrences in a row end the job."""
    if fault.kind in NO_PROGRESS:
        hung = (fault.rank, fault.place)

        def is_same(other: Fault) -> bool:
            return other.kind in NO_PROGRESS and (other.rank, other.place) == hung

        return _streak(fault, earlier, budgets.calm_steps, is_same), _SAME_HANG
    same = 1
    for other in reversed([other for other in earlier if not other.follows]):
        if other.step != fault.step or not other.is_like(fault):
            break
        if fault.died and other.rank != fault.rank:
            break  # deaths of different ranks at one step are not repetitions
        same += 1
    return same, _SAME_DEATH if fault.died else _SAME_EXCEPTION


_AGAIN = "Started again, the job goes on from its newest durable checkpoint, if it has one."


def no_node(fault: Fault, earlier: Sequence[Fault], waited_s: float, spares: int) -> Fail:
    """Return the `Fail` action for a job that has lost a node and got no replacement node."""
    # `spares` counts all spares that took over ranks, even a lost node that returned as a spare
    had = "the job has no spare left" if spares else "the job has no spares"
    return Fail(
        fault.code,
        f"{_who(fault)}; {had}, and no other node joined within {waited_s:g} s. {tried(earlier)}".rstrip(),
        "Give the job `spares`, or start the agent of that node again. " + _AGAIN,
    )


def tried(faults: Iterable[Fault]) -> str:
    """Return one sentence with the numbers of earlier faults at each escalation level; empty if there were no
    faults."""
    counts = Counter(fault.level for fault in faults if fault.level is not None)
    words = [f"{counts[level]} x {level.value}" for level in EscalationLevel if counts[level]]
    return f"Tried before: {', '.join(words)}." if words else ""


def _who(fault: Fault) -> str:
    if fault.node_lost:
        return f"node {fault.node} is lost at step {fault.step}: {fault.cause}"
    return f"rank {fault.rank} (node {fault.node}) at step {fault.step}: {fault.cause}"


def _streak(fault: Fault, earlier: Sequence[Fault], calm_steps: int, is_same: Callable[[Fault], bool]) -> int:
    """Return the length of the series of similar faults that ends with `fault`. Between neighbouring faults of a series
    are fewer than `calm_steps` training steps."""
    count, step = 1, fault.step
    for other in reversed(earlier):
        if not is_same(other):
            continue
        if step - other.step >= calm_steps:
            break
        count, step = count + 1, other.step
    return count
