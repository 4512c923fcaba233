"""Events of faults: detection, injection, and the reactions of ranks."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, Event
from hyperpod_ext.runtime.ipc.declared import Count


class Fault(ByCoordinator):
    """The coordinator has detected a fault and decided how to recover."""

    event: Literal["fault"] = "fault"
    fields_were = {"rung": "escalation_level"}
    rank: Count
    node: Count
    step: Count
    """The step that the rank was making when it failed."""
    cause: str
    died: bool
    """Whether the rank's process has ended."""
    phase: str = ""
    """The rank's phase within its step; empty if unknown."""
    kind: FaultKind | Literal[""] = ""
    escalation_level: str = ""
    """Level at which the job recovers: in process, process or node. The level is empty if the fault ends the job, or if
    the job already recovers from an earlier fault."""
    late: bool = False
    """Whether an earlier fault, on the same node or in the same generation, caused this fault. A fault with `late` true
    does not count against the restart limits."""


class Aborted(ByWorker):
    """A rank has left a generation that was aborted, for example because of a fault."""

    event: Literal["aborted"] = "aborted"
    was = ("freed",)
    step: Count
    """The newest step that the rank has made."""


class CollectiveBroke(ByWorker):
    """A collective has failed in a rank, and no fault is known that explains it."""

    event: Literal["collective_broke"] = "collective_broke"
    step: Count
    cause: str


class GivenUp(ByWorker):
    """A rank abandons its current step because of a fault in another rank."""

    event: Literal["given_up"] = "given_up"
    step: Count


class Stuck(ByAgent):
    """A worker did not leave its generation in time, so its agent kills it."""

    event: Literal["stuck"] = "stuck"
    rank: Count
    step: Count


class Hung(ByAgent):
    """A worker makes no progress, so its agent will kill it."""

    event: Literal["hung"] = "hung"
    rank: Count
    cause: str
    phase: str


class Stacks(ByAgent):
    """The agent has requested the Python stacks of a hung worker."""

    event: Literal["stacks"] = "stacks"
    rank: Count
    dumped: bool
    log: str
    """The file that contains the stacks."""


class Killed(ByAgent):
    """The agent has killed a worker to rehearse a recovery, as the agent's arguments request."""

    event: Literal["killed"] = "killed"
    rank: Count
    step: Count


class FaultOrdered(ByAgent):
    """A rank has received a fault that `hp-ext chaos` ordered. The rank will inject the fault at a later change of its
    phase."""

    event: Literal["fault_ordered"] = "fault_ordered"
    rank: Count
    kind: str
    """Kind of the fault, as in `hp-ext chaos`."""
    step: Count | None = None


class FaultMissed(ByWorker):
    """A fault was not injected, because its order reached the rank after the step that the order names."""

    event: Literal["fault_missed"] = "fault_missed"
    kind: str
    """Kind of the fault, as in `hp-ext chaos`."""
    step: Count
    """The step in which the fault should have been injected."""
    at: Count
    """The step that the rank was making when it received the order."""


class Injected(Event):
    """A fault was injected: into a rank by its worker or agent, or into a whole node by the node's agent."""

    sender = "worker or agent"
    event: Literal["injected"] = "injected"
    kind: str
    """Kind of the fault, as in `hp-ext chaos`."""
    rank: Count | None = None
    node: Count | None = None
    step: Count | None = None
    phase: str = ""
    node_fault: bool = False
