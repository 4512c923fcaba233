"""Section of a job's spec for the checkpoint tier on each node's own disk."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from hyperpod_ext.config.checkpoint.tier import DirectoryTier, EverySteps

_NODE = "{node}"


class DiskTier(DirectoryTier):
    """A directory on each node's own disk, such as NVMe. Snapshots survive the end of all processes and pods of the
    node, but not the loss of the node."""

    survives = frozenset({"process", "job"})
    level = "disk"
    schemes = ()
    distance = 3
    on_node = True
    kind: Literal["disk"] = "disk"
    every_steps: EverySteps = 10
    """Steps between writes of the newest snapshot to this tier. With `auto`, the running job computes the best
    interval, from the cost of saves and the number of faults."""
    path: Annotated[str, Field(min_length=1, examples=["/mnt/nvme/checkpoints"])]
    """Directory on a disk of the node that no other program clears. Snapshots are stored under
    `path/NAME-OF-THE-JOB/`. `{node}` stands for the node's number, for tests with several nodes on one machine."""

    @property
    def mounted(self) -> str:
        return self.path.partition(_NODE)[0].rpartition("/")[0] if _NODE in self.path else self.path

    def on_one_machine(self) -> Self:
        """Return the tier for a job whose nodes all run on one machine: each node has its own folder."""
        return self if _NODE in self.path else self.model_copy(update={"path": f"{self.path}/node-{_NODE}"})

    def on(self, node: int) -> Self:
        return self.model_copy(update={"path": self.path.replace(_NODE, str(node))})
