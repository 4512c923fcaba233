"""One file a system: the calls its own users would make, behind the same few methods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.state import State


@dataclass(frozen=True)
class Place:
    """Where an adapter works."""

    folder: Path
    """In memory (tmpfs), shared by the ranks and by those that come after them; no disk is measured."""
    rank: int = 0
    world_size: int = 1
    overlapped: bool = False
    """Whether `begin` will be called, and not `save`."""
    replicas: int = 0
    """Copies on other nodes; each rank is a node then."""
    sink: str = ""
    """URL of an S3 to drain to."""
    host: dict[str, str] = field(default_factory=dict)
    """What the system's host told."""


@dataclass(frozen=True)
class Host:
    """What outlives the workers."""

    told: dict[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    """Its processes besides the host's own, for their CPU time."""


class Adapter:
    """One system in one rank. What it does not have stays as it is here."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    @contextlib.contextmanager
    def hosting(cls, place: Place) -> Iterator[Host]:
        """Servers of the system that outlive its workers, in a process of their own; nothing, for most."""
        yield Host()

    @classmethod
    def lose_memory_of(cls, place: Place, host: Host, rank: int) -> None:
        """Have the node of `rank` forget what it holds; called in the host, with no worker alive."""
        raise NotImplementedError

    def prepare(self, state: State) -> None:
        """What a script does before its first step, some seconds before the first save."""

    def save(self, state: State, step: int) -> None:
        """When it returns, the state may be changed."""
        raise NotImplementedError

    def begin(self, state: State, step: int) -> None:
        """As `save`, but the state may be changed only after `wait_staged`."""
        self.save(state, step)

    def wait_staged(self) -> None:
        """Wait until the state may be changed."""

    def stepped(self) -> None:
        """A step was made without a save."""

    def busy(self) -> bool:
        """Whether anything of the last save is still done in the background."""
        return False

    def wait_safe(self) -> None:
        """Wait until the last save survives kill -9 of every worker, by what the system promises."""

    def wait_sealed(self) -> None:
        """Wait until the last save has its checksum, and may go on to slower tiers."""

    def wait_replicated(self) -> None:
        """Wait until the last save survives the loss of this rank's node."""

    def flush(self) -> None:
        """Wait until everything in the background is done, and remove what is old."""

    def restore(self, state: State) -> int:
        """Bring the newest save back into these tensors; returns its step."""
        raise NotImplementedError

    def drain(self) -> None:
        """Have the last save in S3, and wait for it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave in good order."""
