"""Events of faults: detection, injection, and the reactions of ranks."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, Event
from hyperpod_ext.runtime.ipc.declared import Count


class Fault(ByCoordinator):
    """The coordinator has seen a fault and decided how to recover."""

    event: Literal["fault"] = "fault"
    fields_were = {"rung": "escalation_level"}
    rank: Count
    node: Count
    step: Count
    """The step that the rank was making."""
    cause: str
    died: bool
    """Whether the process has ended."""
    phase: str = ""
    """The rank's phase within its step; empty: unknown."""
    kind: FaultKind | Literal[""] = ""
    escalation_level: str = ""
    """Level of the recovery: in process, process or node; empty: it ends the job, or another fault was first."""
    late: bool = False
    """Whether it follows from another fault, of its node or of the same generation: such faults count for no budget."""


class Aborted(ByWorker):
    """A rank has left the broken generation."""

    event: Literal["aborted"] = "aborted"
    was = ("freed",)
    step: Count
    """The newest step that the rank has made."""


class CollectiveBroke(ByWorker):
    """A collective has failed, and no known fault explains it."""

    event: Literal["collective_broke"] = "collective_broke"
    step: Count
    cause: str


class GivenUp(ByWorker):
    """A rank abandons its current step because of a fault in another rank."""

    event: Literal["given_up"] = "given_up"
    step: Count


class Stuck(ByAgent):
    """A worker did not leave its generation in time and is killed."""

    event: Literal["stuck"] = "stuck"
    rank: Count
    step: Count


class Hung(ByAgent):
    """A worker makes no progress and will be killed."""

    event: Literal["hung"] = "hung"
    rank: Count
    cause: str
    phase: str


class Stacks(ByAgent):
    """The agent has dumped the stacks of a hanging worker."""

    event: Literal["stacks"] = "stacks"
    rank: Count
    dumped: bool
    log: str
    """The file with the stacks."""


class Killed(ByAgent):
    """The agent has killed a worker, to rehearse a recovery, as its arguments request."""

    event: Literal["killed"] = "killed"
    rank: Count
    step: Count


class FaultOrdered(ByAgent):
    """A rank has received a fault ordered by `hp-ext chaos`, which it injects at a later change of phase."""

    event: Literal["fault_ordered"] = "fault_ordered"
    rank: Count
    kind: str
    """As `hp-ext chaos` has it."""
    step: Count | None = None


class FaultMissed(ByWorker):
    """A fault was not injected: the order reached the rank after the fault's step."""

    event: Literal["fault_missed"] = "fault_missed"
    kind: str
    """As `hp-ext chaos` has it."""
    step: Count
    """The fault's step."""
    at: Count
    """The step that the rank had reached."""


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
