"""Faults that are reported to the membership, and actions that it returns. Plain values."""

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
    """The restart that a fault leads to."""

    IN_PROCESS = "in process"
    """Every process stays; it calls the training function again."""
    PROCESS = "process"
    """The rank's process is replaced, on its node."""
    NODE = "node"
    """All ranks of the node go to another one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of a rank, or of a whole node, that made it leave the generation."""

    rank: int
    """The rank; for a node, its lowest one."""
    cause: str
    """One line for people: `killed by SIGKILL (9)`, `ValueError: ...`."""
    step: int
    """Step that the rank was making."""
    died: bool
    """Whether the rank needs a new process, because the former one is gone or unusable."""
    kind: FaultKind
    final: bool = False
    """Whether trying again cannot help: a wrong configuration, a script that does not start."""
    code: str = "JobFailedError"
    hint: str = ""
    node: int = -1
    """Node of the rank."""
    node_lost: bool = False
    """Whether the node is lost with all its ranks."""
    at: float = 0.0
    """Unix time at which the fault was detected, in seconds. The clocks of all coordinators agree well enough."""
    level: EscalationLevel | None = None
    """Level at which the fault is handled; None before it is decided."""
    place: str = ""
    """Place by which a repeated fault is recognised, with its kind: a line of the script, the phase of a hang. If
    empty, the cause is compared instead."""
    late: bool = False
    """Whether another fault counts in place of this one: it is on the same node, or had already ended the
    generation."""

    @property
    def follows(self) -> bool:
        """Whether this fault is part of another one, which counts instead: eight processes that the kernel ends at one
        moment are one fault of their node."""
        return self.late or self.kind == "stuck"

    def is_like(self, other: Fault) -> bool:
        """Return whether the other fault is a repetition of this one, perhaps on another rank and at another step."""
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
    """Open process groups of this generation, then restore."""

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class AskDurable:
    """List the checkpoints in the durable tiers, and pass them to `durable_answered`."""

    exclude: tuple[tuple[str, str], ...] = ()
    """URL and save id of checkpoints to leave out, because ranks could not restore them."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore this decision instead: some rank could not restore the one before."""

    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Go:
    """Train: every rank has the state of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the process groups, keep everything else, and join this generation."""

    generation: int
    rank: int = -1
    """Rank whose fault ended the last generation; -1 if no fault did."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new process for this rank on its current node, in place of the former one."""

    rank: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Record that a spare has taken over the ranks of a lost node."""

    node: int
    """The spare."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decommission:
    """End the workers of a node whose ranks are on other nodes now, and pass the offers of its memory to
    `decommissioned`."""

    node: int


@dataclass(frozen=True, slots=True)
class AwaitNode:
    """Wait for another node to join, then call `no_node_came`: no spare is left for the ranks of this one."""

    node: int
    """The lost node."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish training: every rank is done."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the job as failed."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Log:
    """Write an event."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WantNodes:
    """Request nodes until the job has `count`, not counting the ones that leave."""

    count: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start a process for this rank of the next rank assignment, while all ranks train."""

    rank: int
    node: int
    world_size: int


@dataclass(frozen=True, slots=True)
class EndPrepared:
    """End the processes on a node that were started for the next rank assignment."""

    node: int


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask every rank whether it can stop after this step."""

    number: int
    step: int
    later: bool = False
    """Whether to ask after a short wait, because some ranks have not begun their loop."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Stop all ranks after the step of request `number`: all of them can."""

    number: int


@dataclass(frozen=True, slots=True)
class WithdrawStop:
    """Withdraw the request `number` to stop. Stopped ranks continue."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release these nodes, and the snapshots of earlier rank assignments: the job no longer needs them."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the job, because too few nodes stay."""


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
