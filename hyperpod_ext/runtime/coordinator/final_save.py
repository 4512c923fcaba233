"""The last upload of a job that ends: which snapshot every node is to upload, and which nodes are done. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from hyperpod_ext.runtime.ipc.control_messages import HeldSnapshot


@dataclass(slots=True)
class FinalSave:
    """What the nodes hold when nobody trains any more, and how far their uploads are."""

    begun: bool = False
    """All ranks are done, and the last step is on its way to the durable tiers."""
    held: dict[int, tuple[HeldSnapshot, ...]] = field(default_factory=dict)
    """Snapshots of each node that has reported them; none, where the node was lost."""
    save_id: str | None = None
    """The snapshot to upload; empty: there is none. None: not all nodes have reported."""
    _done: set[int] = field(default_factory=set)

    def lost(self, node: int) -> None:
        """A node is gone, and uploads nothing any more."""
        self.held.setdefault(node, ())

    def choose(self, nodes: Set[int]) -> bool:
        """Once all `nodes` have reported: choose the newest snapshot that all ranks have. Returns whether it is new."""
        if nodes - self.held.keys() or self.save_id is not None:
            return False
        self.save_id = newest_of_all(self.held)
        return True

    @property
    def step(self) -> int | None:
        """Step of the snapshot."""
        everything = [snapshot for held in self.held.values() for snapshot in held]
        return max((snapshot.step for snapshot in everything if snapshot.save_id == self.save_id), default=None)

    def done(self, node: int) -> None:
        """What `node` can upload is uploaded."""
        self._done.add(node)

    def is_complete(self, nodes: Set[int]) -> bool:
        """Whether no node can do more for it."""
        return nodes <= self._done


def newest_of_all(held: Mapping[int, Collection[HeldSnapshot]]) -> str:
    """Save id of the newest snapshot that every rank has on its own node; empty: there is none.

    Every rank of those that made it: a job that ends while nodes leave may have none of its new world yet.
    """
    ranks: dict[tuple[int, int, str], set[int]] = {}
    complete: list[tuple[int, int, str]] = []
    for one in (snapshot for snapshots in held.values() for snapshot in snapshots):
        if not one.replica:
            commit = one.step, one.generation, one.save_id
            having = ranks.setdefault(commit, set())
            having.add(one.rank)
            if len(having) == one.world_size:
                complete.append(commit)
    return max(complete, default=(0, 0, ""))[2]
