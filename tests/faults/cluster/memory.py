"""Memory of a simulated node: what it keeps of the last commits of ranks, its own and copies of others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import Done

KEPT = 2
"""Snapshots of each rank."""
_STATUS, _DONE = r.ServerStatus(snapshots=(), copying=()), Done()


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's state after one step. `history` names the steps that led to it."""

    rank: int
    step: int
    generation: int
    history: int
    sharing: str
    world_size: int
    kept_at: float = 0.0
    replica: bool = False

    @property
    def save_id(self) -> str:
        return f"g{self.generation}-s{self.step}"

    @property
    def own_digest(self) -> str:
        return f"{self.history}:{self.rank}" if self.sharing == "shard" else str(self.history)

    def summary(self) -> dict[str, Any]:
        """As a memory server tells it."""
        names = ("rank", "step", "generation", "save_id", "world_size", "own_digest", "sharing", "replica")
        return {**{name: getattr(self, name) for name in names}, "content": self.own_digest}


class Memory:
    """Of one node; it is gone with its agent.

    Args:
        now: the time.
        replicate: brings a copy to another node.
    """

    def __init__(self, now: Callable[[], float], replicate: Callable[[int, Copy], None], node: int) -> None:
        self._now, self._replicate, self._node = now, replicate, node
        self.copies: list[Copy] = []
        self.answered: list[Copy] = []
        """What it had when it was asked last."""
        self._generation = 0
        self._began = self._begins_at = 0
        self._peers: list[int] = []
        self.ended = ""
        self.on_silent: Any = None
        self.unreadable_until = 0.0

    def save(self, copy: Copy) -> bool:
        """A rank saves; False: it is of an older generation, and refused."""
        if copy.generation < self._generation:
            return False
        self._keep(replace(copy, kept_at=self._now()))
        if copy.sharing == "shard" and len(self._peers) > 1 and self._node in self._peers:
            self._replicate(self._peers[(self._peers.index(self._node) + 1) % len(self._peers)], copy)
        return True

    def receive(self, copy: Copy) -> None:
        """Another node's."""
        if copy.generation >= self._began or copy.step <= self._begins_at:
            self._keep(replace(copy, replica=True, kept_at=self._now()))

    def _keep(self, copy: Copy) -> None:
        same = [one for one in self.copies if one.rank == copy.rank and one.replica == copy.replica]
        for old in same[: max(0, len(same) - KEPT + 1)]:
            self.copies.remove(old)
        self.copies.append(copy)

    def find(self, rank: int, save_id: str) -> Copy | None:
        if self._now() < self.unreadable_until:
            return None
        return next((one for one in self.copies if one.rank == rank and one.save_id == save_id), None)

    async def ask(self, request: Any) -> Any:
        """As the agent asks."""
        match request:
            case r.Listen():
                return r.PeerPort(port=7000 + self._node)
            case r.Held():
                self.answered = list(self.copies)
                return r.Snapshots(snapshots=tuple(copy.summary() for copy in self.copies))
            case r.Fence(generation=generation, step=step):
                self._generation = max(self._generation, generation)
                if step is not None:
                    self._began, self._begins_at = generation, step
                    self.copies = [
                        copy for copy in self.copies if not (copy.step > step and copy.generation < generation)
                    ]
            case r.Peers(peers=peers):
                self._peers = sorted(peers)
            case r.Status():
                return _STATUS
            case r.UploadNow():
                return r.UploadProgress(idle=True, tiers=())
        return _DONE

    async def watch(self) -> None:
        """It always answers."""

    def lost(self, for_good: str = "") -> None:
        self.ended = for_good
