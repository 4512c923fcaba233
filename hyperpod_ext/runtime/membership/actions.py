"""The faults that are reported to the `Membership` state machine, and the actions that it returns. Data classes without
logic."""

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
    """The parts of the job that are restarted to recover from a fault."""

    IN_PROCESS = "in process"
    """All processes keep running, and call the training function again."""
    PROCESS = "process"
    """The rank's process is replaced on the same node."""
    NODE = "node"
    """All ranks of the node move to another node."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one rank or of one whole node. The rank or node has left the current generation."""

    rank: int
    """The failed rank, or the lowest rank of a lost node."""
    cause: str
    """Human-readable cause in one line, such as `killed by SIGKILL (9)` or `ValueError: ...`."""
    step: int
    """Training step that the rank was computing when it failed."""
    died: bool
    """Whether the rank needs a new process, because its process has ended or is unusable."""
    kind: FaultKind
    final: bool = False
    """Whether the job must end because a restart would fail in the same way, for example with a wrong configuration."""
    code: str = "JobFailedError"
    hint: str = ""
    node: int = -1
    """Node of the rank."""
    node_lost: bool = False
    """Whether the whole node is lost, with all its ranks."""
    at: float = 0.0
    """Unix time in seconds at which a coordinator detected the fault. The clocks of coordinators must roughly agree."""
    level: EscalationLevel | None = None
    """Escalation level at which the fault is handled; None before the level is decided."""
    place: str = ""
    """Location of the fault, such as a line of the script or the phase of a hang. Two faults of one kind count as
    repetitions if they have the same location, or the same `cause` if `place` is empty."""
    late: bool = False
    """Whether this fault is only a consequence of an earlier fault, which is counted instead. The earlier fault was on
    the same node, or had already ended the generation."""

    @property
    def follows(self) -> bool:
        """Whether this fault is a consequence of another fault, so that only the other fault counts. For example, if
        the kernel kills eight processes of a node at once, one fault counts."""
        return self.late or self.kind == "stuck"

    def is_like(self, other: Fault) -> bool:
        """Return whether `other` is a repetition of this fault, perhaps on another rank or at another step."""
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
    """Order every rank to create the process groups of the new generation, and then to restore its state."""

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class AskDurable:
    """Request a list of the checkpoints in the durable tiers, and pass the list to `Membership.durable_answered`."""

    exclude: tuple[tuple[str, str], ...] = ()
    """URL and save id of each checkpoint to leave out, because ranks could not restore it."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Order every rank to restore according to a new decision, because a rank could not restore the previous
    decision."""

    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Go:
    """Order every rank to start training. All ranks have restored the state of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Order every rank to leave its process groups, keep its process and state, and join generation `generation`."""

    generation: int
    rank: int = -1
    """Rank whose fault ended the previous generation; -1 if no fault ended it."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the process of a rank by a new process on the same node."""

    rank: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Log that a spare node has taken over the ranks of a lost node."""

    node: int
    """Number of the spare node that has taken over the ranks."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decommission:
    """End the workers of a node whose ranks are now on other nodes, then pass the list of snapshots in the node's
    memory to `Membership.decommissioned`."""

    node: int


@dataclass(frozen=True, slots=True)
class AwaitNode:
    """Wait until a node joins to replace a lost node, because no spare is left. If no node joins in time, call
    `Membership.no_node_came`."""

    node: int
    """Number of the lost node."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job successfully, because the training function has returned on every rank."""


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
    """Request nodes from the cluster until the job has `count` nodes, not counting nodes that are leaving the job."""

    count: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start a process for a rank of the next rank assignment, while the ranks of the current assignment train."""

    rank: int
    node: int
    world_size: int


@dataclass(frozen=True, slots=True)
class EndPrepared:
    """End all processes on `node` that were started for the next rank assignment, because this assignment was
    cancelled."""

    node: int


@dataclass(frozen=True, slots=True)
class AskStop:
    """Request every rank to stop after `step`. Each rank answers whether it can stop after `step`."""

    number: int
    step: int
    later: bool = False
    """Whether to wait shortly before the request, because some ranks have not begun their training loop."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Order every rank to stop after the step of stop request `number`, because every rank has agreed to stop request
    `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class WithdrawStop:
    """Cancel stop request `number`. Ranks that have already stopped continue to train."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release nodes, and delete the snapshots of earlier rank assignments, because the job no longer needs them."""

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
