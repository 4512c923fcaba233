"""Where snapshots live, how often each place gets one, and how many it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from hyperpod_ext.config.base import Config


class MemoryTier(Config):
    """Memory of the node itself: survives the death of every worker process on it."""

    kind: Literal["memory"] = "memory"
    every_steps: PositiveInt = 1
    """Take a snapshot each time this many steps have been made."""
    budget_mib: PositiveInt | None = None
    """Most memory the tier may take on one node, in MiB. Default: whatever the node has free."""


class PeerTier(Config):
    """Memory of other nodes: survives the loss of `replicas` nodes at once."""

    kind: Literal["peer"] = "peer"
    every_steps: PositiveInt = 10
    """Copy the newest snapshot to peers each time this many steps have been made."""
    replicas: PositiveInt = 1
    """Copies of each snapshot, each on a different node."""


class S3Tier(Config):
    """An S3 prefix: survives the loss of the whole cluster."""

    kind: Literal["s3"] = "s3"
    uri: Annotated[
        str,
        Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", examples=["s3://bucket/prefix"]),
    ]
    """Bucket and prefix, `s3://bucket/prefix`."""
    every_steps: PositiveInt = 100
    """Upload the newest snapshot each time this many steps have been made."""
    keep: PositiveInt = 3
    """Checkpoints kept under the prefix; older ones are deleted."""


class FileTier(Config):
    """A shared POSIX directory, FSx for example: survives the loss of every node."""

    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1, examples=["/fsx/checkpoints"])]
    """Directory that every node sees under this path."""
    every_steps: PositiveInt = 100
    """Write the newest snapshot each time this many steps have been made."""
    keep: PositiveInt = 3
    """Checkpoints kept in the directory; older ones are deleted."""


Tier = Annotated[MemoryTier | PeerTier | S3Tier | FileTier, Field(discriminator="kind")]


class CheckpointPolicy(Config):
    """The tiers in order, nearest first."""

    tiers: tuple[Tier, ...] = (MemoryTier(),)
    """Places a snapshot goes to, nearest first; each kind at most once."""
    when_busy: Literal["wait", "skip", "supersede"] = "supersede"
    """When a save is due while the one before is still in flight: `wait` for it, `skip` this one, or
    `supersede` an older copy that has not been drained. The last whole snapshot is never given up:
    in the memory tier, which holds two, `supersede` therefore waits for the seal."""

    def memory(self) -> MemoryTier | None:
        """The memory tier of this policy, if it has one."""
        return next((tier for tier in self.tiers if isinstance(tier, MemoryTier)), None)
