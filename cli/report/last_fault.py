"""Describes the newest fault of a job from the job's events: cause, consequences, reactions and outcome. Pure.

All faults between two resumptions of training count as one fault with its consequences. The cause is the first fault,
preferably one that is not a closed connection, because a connection closes when the process at its other end dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.events.of_nodes import (
    AwaitingNode,
    Coordinator,
    MemoryBack,
    MemoryLost,
    NodeLost,
    NodeReplaced,
)
from hyperpod_ext.runtime.events.of_training import Go, JobEnded, Restored, RestoreFailed

_MET = {
    "in process": "the training function was called again in the same process",
    "process": "the process was replaced",
    "node": "the ranks were assigned to another node",
}
"""Text of the job's reaction to a fault, by the escalation level of the fault."""
_FROM = {
    "self": "",
    "live": ", one rank with the state of a live rank",
    "memory": ", one rank with the state in its node's memory",
    "peer": ", one rank with the copy in another node's memory",
    "durable": ", from a durable checkpoint",
    "fresh": ", which is the start",
}
"""Text about the source of the restored state, by the name of the source. Nearer sources come first."""
_NEAREST_FIRST = tuple(_FROM)


@dataclass(frozen=True, slots=True)
class LastFault:
    """Description of the newest fault of a job. Each text is a sentence without a full stop."""

    cause: str
    chain: tuple[str, ...]
    """Further faults that were consequences of the cause."""
    tried: tuple[str, ...]
    """Reactions of the job to the fault, oldest first."""
    outcome: str
    recovered: bool
    """Whether training continued after the fault."""
    kind: str
    """Kind of the fault that was the cause, or `memory-server` for the loss of a memory server."""
    to_do: tuple[str, ...]
    """Advice about what the user can change."""

    @property
    def sentence(self) -> str:
        """Cause and consequences of the fault as one text."""
        return self.cause + (f". Then: {'; '.join(self.chain)}" if self.chain else "")


def last_fault(events: Events) -> LastFault | None:
    """Return the newest fault of a job from the job's events; None if there was no fault."""
    hits = [index for index, event in enumerate(events) if isinstance(event, Fault | NodeLost | MemoryLost)]
    if not hits:
        return None
    newest = hits[-1]
    if isinstance(events[newest], MemoryLost):  # the loss of a memory server does not interrupt training
        return _of_memory_server(events, newest)
    begins = next((index + 1 for index in range(newest, -1, -1) if isinstance(events[index], Go)), 0)
    ends = next((index for index in range(newest, len(events)) if isinstance(events[index], Go)), len(events))
    story = Events(events[begins:ends])
    faults = [event for event in story if isinstance(event, Fault | NodeLost | MemoryLost)]
    faults = faults[next(index for index, event in enumerate(faults) if not isinstance(event, MemoryLost)) :]
    cause = next((event for event in faults if getattr(event, "kind", "") != "connection"), faults[0])
    chain = [event for event in faults if event is not cause and not _is_repeated(event, faults)]
    outcome, recovered = _outcome(events, ends)
    return LastFault(
        cause=_words(cause),
        chain=tuple(dict.fromkeys(map(_words, chain))),
        tried=tuple(dict.fromkeys(_tried(story))),
        outcome=outcome,
        recovered=recovered,
        kind=_kind(cause),
        to_do=(),
    )


def _of_memory_server(events: Events, index: int) -> LastFault:
    lost = events[index]
    assert isinstance(lost, MemoryLost)
    back = [event for event in events[index:] if isinstance(event, MemoryBack) and event.node == lost.node]
    tried = (f"a new memory server was ready after {back[0].seconds:.2f} s",) if back else ()
    ended = events.last(JobEnded)
    outcome = "training continued" if back else f"the job {ended.state}" if ended else "no new memory server started"
    return LastFault(_words(lost), (), tried, outcome, recovered=bool(back), kind="memory-server", to_do=())


def _is_repeated(event: Event, faults: Sequence[Event]) -> bool:
    """Return whether the fault `event` is part of the loss of a node for which there is a NodeLost event."""
    lost = {other.node for other in faults if isinstance(other, NodeLost)}
    return isinstance(event, Fault) and event.kind == "lost" and event.node in lost


def _words(event: Event) -> str:
    match event:
        case NodeLost():
            return f"node {event.node} was lost: {_first_line(event.cause)}"
        case MemoryLost():
            return f"node {event.node}, step {event.step}: {_first_line(event.cause)}"
        case Fault():
            phase = f" ({event.phase})" if event.phase else ""
            return f"rank {event.rank} on node {event.node}, step {event.step}{phase}: {_first_line(event.cause)}"
    raise AssertionError(f"{type(event).__name__} is not a fault")


def _kind(event: Event) -> str:
    return event.kind if isinstance(event, Fault) else "memory-server" if isinstance(event, MemoryLost) else "lost"


def _tried(story: Events) -> Iterator[str]:
    for event in story:
        match event:
            case Fault() if event.escalation_level in _MET:
                yield _MET[event.escalation_level]
            case AwaitingNode():
                yield f"the job waited up to {event.seconds:g} s for another node in place of node {event.node}"
            case NodeReplaced():
                ranks = ", ".join(map(str, event.ranks))
                yield f"node {event.node} took rank{'s' if len(event.ranks) > 1 else ''} {ranks}"
            case Coordinator():
                yield f"node {event.node} took over from the coordinator on node {event.before}"
            case RestoreFailed():
                yield f"rank {event.rank} rejected the state to restore: {_first_line(event.error)}"


def _outcome(events: Events, ends: int) -> tuple[str, bool]:
    if ends < len(events):
        went_on = events[ends]
        assert isinstance(went_on, Go)
        sources = {event.source for event in events[ends:] if isinstance(event, Restored)} & set(_NEAREST_FIRST)
        far = max(sources, key=_NEAREST_FIRST.index, default="self")
        return f"all ranks continued after step {went_on.step}{_FROM[far]}", True
    ended = events.last(JobEnded)
    if ended is not None:
        return f"the job {ended.state}" if ended.state != "cancelled" else "the job was cancelled", False
    return "no rank has continued since", False


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
