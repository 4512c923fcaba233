"""The last upload of a job: the snapshot that every node must upload, and the nodes that are done. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from hyperpod_ext.runtime.ipc.control_messages import HeldSnapshot


@dataclass(slots=True)
class FinalSave:
    """Snapshots that the nodes hold after training, and the progress of uploading the last one."""

    begun: bool = False
    """Whether all ranks are done and nodes upload the last step to the durable tiers."""
    held: dict[int, tuple[HeldSnapshot, ...]] = field(default_factory=dict)
    """Snapshots of each node that has reported; empty for a lost node."""
    save_id: str | None = None
    """Save id of the snapshot to upload. None until all nodes have reported; empty if no snapshot is complete."""
    _done: set[int] = field(default_factory=set)

    def lost(self, node: int) -> None:
        """Record the loss of a node, so that its report is not awaited."""
        self.held.setdefault(node, ())

    def choose(self, nodes: Set[int]) -> bool:
        """Choose the newest snapshot that all ranks have, once all `nodes` have reported. Returns whether this call
        made the choice."""
        if nodes - self.held.keys() or self.save_id is not None:
            return False
        self.save_id = newest_of_all(self.held)
        return True

    @property
    def step(self) -> int | None:
        """Step of the chosen snapshot; None if no snapshot was chosen."""
        everything = [snapshot for held in self.held.values() for snapshot in held]
        return max((snapshot.step for snapshot in everything if snapshot.save_id == self.save_id), default=None)

    def done(self, node: int) -> None:
        """Record that `node` has uploaded everything that it could."""
        self._done.add(node)

    def is_complete(self, nodes: Set[int]) -> bool:
        """Return whether all `nodes` have uploaded."""
        return nodes <= self._done


def newest_of_all(held: Mapping[int, Collection[HeldSnapshot]]) -> str:
    """Return the save id of the newest snapshot that every rank has on its own node; empty if there is none.

    "Every rank" means every rank that took part in the snapshot. If the job ends during a resize, the new rank
    assignment may have no snapshot yet.
    """
    ranks: dict[tuple[int, int, str], set[int]] = {}
    complete: list[tuple[int, int, str]] = []
    for one in (snapshot for snapshots in held.values() for snapshot in snapshots):
        if not one.replica:
            commit = one.step, one.generation, one.save_id
            owners = ranks.setdefault(commit, set())
            owners.add(one.rank)
            if len(owners) == one.world_size:
                complete.append(commit)
    return max(complete, default=(0, 0, ""))[2]
