"""Events of faults: how they are found, injected, and what ranks do then."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, Event
from hyperpod_ext.runtime.ipc.declared import Count


class Fault(ByCoordinator):
    """A fault was seen, and what it is met with was decided."""

    event: Literal["fault"] = "fault"
    fields_were = {"rung": "escalation_level"}
    rank: Count
    node: Count
    step: Count
    """The step that the rank was making."""
    cause: str
    died: bool
    """Whether the process is gone."""
    phase: str = ""
    """Where in its step the rank was; empty: it could not tell."""
    kind: FaultKind | Literal[""] = ""
    escalation_level: str = ""
    """How far up it was taken: in process, process or node; empty: it ends the job, or another fault was first."""
    late: bool = False
    """Whether another fault stands for it, which ended its generation or is its node's: it counts for no budget."""


class Aborted(ByWorker):
    """A rank has left the generation that is over."""

    event: Literal["aborted"] = "aborted"
    was = ("freed",)
    step: Count
    """The newest step that it has made."""


class CollectiveBroke(ByWorker):
    """A collective has failed, and no fault is known that explains it."""

    event: Literal["collective_broke"] = "collective_broke"
    step: Count
    cause: str


class GivenUp(ByWorker):
    """A rank gives up the step that it is making, for a fault elsewhere that it had not noticed."""

    event: Literal["given_up"] = "given_up"
    step: Count


class Stuck(ByAgent):
    """A worker did not leave its generation in time and is ended."""

    event: Literal["stuck"] = "stuck"
    rank: Count
    step: Count


class Hung(ByAgent):
    """A worker makes no progress and will be ended."""

    event: Literal["hung"] = "hung"
    rank: Count
    cause: str
    phase: str


class Stacks(ByAgent):
    """The stacks of a worker that hangs were dumped."""

    event: Literal["stacks"] = "stacks"
    rank: Count
    dumped: bool
    log: str
    """The file they are in."""


class Killed(ByAgent):
    """The agent has killed a worker because its arguments say so, to try a recovery."""

    event: Literal["killed"] = "killed"
    rank: Count
    step: Count


class FaultOrdered(ByAgent):
    """A rank was told of a fault that `hp-ext chaos` orders for it: it looks for that at its next change of phase."""

    event: Literal["fault_ordered"] = "fault_ordered"
    rank: Count
    kind: str
    """As `hp-ext chaos` has it."""
    step: Count | None = None


class FaultMissed(ByWorker):
    """A fault was not injected: when its rank heard of it, the step that it is for was past."""

    event: Literal["fault_missed"] = "fault_missed"
    kind: str
    """As `hp-ext chaos` has it."""
    step: Count
    """The step that it is for."""
    at: Count
    """The step that the rank had come to."""


class Injected(Event):
    """A fault was injected: into a rank by its worker or agent, or into a whole node by its agent."""

    sender = "worker or agent"
    event: Literal["injected"] = "injected"
    kind: str
    """As `hp-ext chaos` has it."""
    rank: Count | None = None
    node: Count | None = None
    step: Count | None = None
    phase: str = ""
    node_fault: bool = False
