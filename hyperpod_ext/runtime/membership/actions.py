"""Faults that a membership hears of, and the actions that it asks for. Plain values."""

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
    """What a fault costs."""

    IN_PROCESS = "in process"
    """Every process stays; the training function is called again."""
    PROCESS = "process"
    """The rank's process is replaced, on its node."""
    NODE = "node"
    """All ranks of the node go to another one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a rank, or a whole node, left the generation."""

    rank: int
    """Of a node: its lowest."""
    cause: str
    """`killed by SIGKILL (9)`, `ValueError: ...`: one line, for people."""
    step: int
    """Step it was making."""
    died: bool
    """Whether its process is gone, or cannot be used any more, and needs a replacement."""
    kind: FaultKind
    final: bool = False
    """Whether trying again cannot help: a wrong configuration, a script that does not start."""
    code: str = "JobFailedError"
    hint: str = ""
    node: int = -1
    """Where it was."""
    node_lost: bool = False
    """Whether the node is lost with all its ranks."""
    at: float = 0.0
    """When it was seen: seconds since the epoch, which all coordinators of a job share well enough."""
    level: EscalationLevel | None = None
    """What it cost."""
    place: str = ""
    """What it has in common with the same fault when that comes again, beside its kind: a line of the script, the phase
    of a hang. Empty: its cause."""
    late: bool = False
    """Whether another fault had ended its generation already, or stands for it."""

    @property
    def follows(self) -> bool:
        """Whether it came with another fault, which is the one that counts: eight processes that the kernel ends at
        one moment are one fault of their node."""
        return self.late or self.kind == "stuck"

    def is_like(self, other: Fault) -> bool:
        """Whether the other is this one, at another time. It may be of another rank, and at another step."""
        mine, its = (self.place or self.cause), (other.place or other.cause)
        return (self.kind, self.died, mine) == (other.kind, other.died, its)

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
    """Find out what the durable tiers hold, and call `durable_answered`."""

    exclude: tuple[tuple[str, str], ...] = ()
    """URL and save id of checkpoints that have been refused: what else is there?"""


@dataclass(frozen=True, slots=True)
class Restore:
    """The first choice could not be restored by all; here is the next."""

    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Go:
    """Everybody has the state of this step: train."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the process groups, keep everything else, and join this generation."""

    generation: int
    rank: int = -1
    """Whose fault it is; -1: nobody's."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new process for this rank, on the node that has it now; end the one that is there."""

    rank: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A spare has the ranks of a lost node from now on."""

    node: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decommission:
    """The node's ranks are elsewhere: end its workers, and report what its memory holds (`decommissioned`)."""

    node: int


@dataclass(frozen=True, slots=True)
class AwaitNode:
    """No spare is left: give another node some time to come, then call `no_node_came`."""

    node: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody is done."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot go on."""

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
    """So many nodes should be there, those that leave not counted."""

    count: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start a process for this rank of the next rank assignment, while the others train."""

    rank: int
    node: int
    world_size: int


@dataclass(frozen=True, slots=True)
class EndPrepared:
    """End the processes on a node that were to be ranks of the next rank assignment."""

    node: int


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask every rank whether it can stop after this step."""

    number: int
    step: int
    later: bool = False
    """Some are not ready to say; ask in a moment."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """All can: they stop there."""

    number: int


@dataclass(frozen=True, slots=True)
class WithdrawStop:
    """Nobody needs to stop any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """These nodes are not needed any more."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the job as if somebody had asked for it: too few nodes stay."""


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
