"""Checkpoints on each node's own disk."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from hyperpod_ext.config.checkpoint.tier import DirectoryTier, EverySteps

_NODE = "{node}"


class DiskTier(DirectoryTier):
    """A directory on each node's own disk, such as NVMe. Its snapshots survive the end of all processes and pods of the
    node, but not the loss of the node."""

    survives = frozenset({"process", "job"})
    level = "disk"
    schemes = ()
    distance = 3
    on_node = True
    kind: Literal["disk"] = "disk"
    every_steps: EverySteps = 10
    """Write the newest snapshot each time this many steps have been made.
    `auto`: the running job finds the best interval, from what saves cost it and how often it fails."""
    path: Annotated[str, Field(min_length=1, examples=["/mnt/nvme/checkpoints"])]
    """Directory on a disk of the node, which nothing else clears. Snapshots go under `path/NAME-OF-THE-JOB/`. `{node}`
    stands for the node's number, for several nodes of a test that share one machine."""

    @property
    def mounted(self) -> str:
        return self.path.partition(_NODE)[0].rpartition("/")[0] if _NODE in self.path else self.path

    def on_one_machine(self) -> Self:
        """The tier where several nodes share a machine."""
        return self if _NODE in self.path else self.model_copy(update={"path": f"{self.path}/node-{_NODE}"})

    def on(self, node: int) -> Self:
        return self.model_copy(update={"path": self.path.replace(_NODE, str(node))})
