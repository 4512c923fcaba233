"""Chooses the last snapshot of a job, and tracks which nodes have uploaded their part of it. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from hyperpod_ext.runtime.ipc.control_messages import HeldSnapshot


@dataclass(slots=True)
class FinalSave:
    """The snapshots that nodes hold after training, and the progress of uploading the newest of these snapshots."""

    begun: bool = False
    """Whether training is done on all ranks, so that the nodes upload the last step to the durable tiers."""
    held: dict[int, tuple[HeldSnapshot, ...]] = field(default_factory=dict)
    """Maps each node that has reported to the snapshots in its memory; a lost node has an empty tuple."""
    save_id: str | None = None
    """Save id of the snapshot to upload, or None until all nodes have reported. The save id is empty if all nodes have
    reported and no snapshot exists on all ranks."""
    _done: set[int] = field(default_factory=set)

    def lost(self, node: int) -> None:
        """Record that `node` is lost, so that the choice does not wait for its report."""
        self.held.setdefault(node, ())

    def choose(self, nodes: Set[int]) -> bool:
        """Choose the newest snapshot that all ranks have, if all `nodes` have reported and no choice was made before.
        Returns whether this call made the choice."""
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
        """Record that `node` has finished uploading its part of the last step, completely or not."""
        self._done.add(node)

    def is_complete(self, nodes: Set[int]) -> bool:
        """Return whether all `nodes` have finished uploading."""
        return nodes <= self._done


def newest_of_all(held: Mapping[int, Collection[HeldSnapshot]]) -> str:
    """Return the save id of the newest snapshot that every rank has on its own node; empty if there is none.

    "Every rank" means every rank of the world size with which the snapshot was saved. If the job ends during a resize,
    before the new rank assignment has saved a snapshot, the newest snapshot has the world size from before the resize.
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
