"""Plain values: faults that are reported to the membership, and actions that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.snapshot.select import Decision


class JobPhase(Enum):
    FORMING = "forming"
    RESTORING = "restoring"
    RUNNING = "running"
    ENDED = "ended"


class EscalationLevel(Enum):
    """What is restarted to recover from a fault."""

    IN_PROCESS = "in process"
    """All processes stay, and call the training function again."""
    PROCESS = "process"
    """The rank's process is replaced on the same node."""
    NODE = "node"
    """All ranks of the node move to another node."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of a rank or a whole node that made it leave its generation."""

    rank: int
    """The rank; for a node, its lowest rank."""
    cause: str
    """One line for people, such as `killed by SIGKILL (9)` or `ValueError: ...`."""
    step: int
    """Step that the rank was making when it failed."""
    died: bool
    """Whether the rank needs a new process, because the former one is gone or unusable."""
    kind: FaultKind
    final: bool = False
    """Whether a restart cannot help, as with a wrong configuration or a script that does not start."""
    code: str = "JobFailedError"
    hint: str = ""
    node: int = -1
    """Node of the rank."""
    node_lost: bool = False
    """Whether the node is lost with all its ranks."""
    at: float = 0.0
    """Unix time at which the fault was detected, in seconds. The clocks of all coordinators agree well enough for
    this."""
    level: EscalationLevel | None = None
    """Level at which the fault is handled; None before the level is decided."""
    place: str = ""
    """Place of the fault, such as a line of the script or the phase of a hang. A repeated fault is recognised by its
    kind and place. If the place is empty, the cause is compared instead."""
    late: bool = False
    """Whether another fault counts instead of this one. The other fault is on the same node, or had already ended the
    generation."""

    @property
    def follows(self) -> bool:
        """Whether this fault is part of another fault, which counts instead. If the kernel kills eight processes of a
        node at one moment, they are one fault of the node."""
        return self.late or self.kind == "stuck"

    def is_like(self, other: Fault) -> bool:
        """Return whether `other` repeats this fault, perhaps on another rank or at another step."""
        own, others = (self.place or self.cause), (other.place or other.cause)
        return (self.kind, self.died, own) == (other.kind, other.died, others)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"level": self.level.value if self.level is not None else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fault:
        known = {key: value for key, value in data.items() if key != "level"}
        return cls(**known, level=EscalationLevel(data["level"]) if data["level"] else None)


@dataclass(frozen=True, slots=True)
class Begin:
    """Open the process groups of this generation, then restore."""

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class AskDurable:
    """List the checkpoints in the durable tiers, and pass them to `durable_answered`."""

    exclude: tuple[tuple[str, str], ...] = ()
    """URL and save id of each checkpoint to leave out, because ranks could not restore it."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore this decision, because some rank could not restore the previous one."""

    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Go:
    """Train, because every rank has the state of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the process groups, keep everything else, and join the given generation."""

    generation: int
    rank: int = -1
    """Rank whose fault ended the previous generation; -1 if no fault did."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the process of this rank by a new one on the same node."""

    rank: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Record that a spare has taken over the ranks of a lost node."""

    node: int
    """The spare that has taken over the ranks."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decommission:
    """End the workers of a node whose ranks are now on other nodes. Then pass the offers from the node's memory to
    `decommissioned`."""

    node: int


@dataclass(frozen=True, slots=True)
class AwaitNode:
    """Wait until another node joins, because no spare is left. Call `no_node_came` if none joins in time."""

    node: int
    """The lost node."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish training, because every rank is done."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the job with state `failed`."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Log:
    """Write an event to the job's log."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WantNodes:
    """Request nodes until the job has `count` nodes, not counting nodes that leave."""

    count: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start a process for this rank of the next rank assignment, while the present ranks train."""

    rank: int
    node: int
    world_size: int


@dataclass(frozen=True, slots=True)
class EndPrepared:
    """End all processes on a node that were started for the next rank assignment."""

    node: int


@dataclass(frozen=True, slots=True)
class AskStop:
    """Request from every rank an answer whether it can stop after this step."""

    number: int
    step: int
    later: bool = False
    """Whether to send the request after a short wait, because some ranks have not begun their loop."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Stop all ranks after the step of request `number`, because all of them can."""

    number: int


@dataclass(frozen=True, slots=True)
class WithdrawStop:
    """Withdraw stop request `number`. Ranks that have stopped continue."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release these nodes, and snapshots of earlier rank assignments, because the job no longer needs them."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the job, because too few nodes remain."""


Action = (
    Begin
    | AskDurable
    | Restore
    | Go
    | Abort
    | Replace
    | TakeOver
    | Decommission
    | AwaitNode
    | Finish
    | Fail
    | Log
    | WantNodes
    | Prepare
    | EndPrepared
    | AskStop
    | StopAt
    | WithdrawStop
    | Release
    | Cancel
)
