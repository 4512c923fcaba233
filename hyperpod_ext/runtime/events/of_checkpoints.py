"""Events of checkpoints: copies to other tiers, and where the last step goes."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Declared, Listed, Seconds


class Copying(ByAgent):
    """Something has changed in how copies to another tier go."""

    event: Literal["copying"] = "copying"
    tier: str
    """`peer`, or the URL of a durable tier."""
    failed: Count = 0
    """Copies that failed since the memory server started."""
    skipped: Count = 0
    """Copies that were left out as the one before was still on its way."""
    superseded: Count = 0
    """Copies that were taken back for newer ones."""
    last_error: str | None = None
    newest_step: Count | None = None
    """The newest step there; null: there is none."""
    fell_back: str = ""
    """Why copies to peers go over TCP, where they were to go by NIXL."""


class Durable(ByCoordinator):
    """The durable tiers were searched for checkpoints."""

    event: Literal["durable"] = "durable"
    node: Count | None = None
    """Node whose own disks were searched; null for tiers that all nodes share."""
    steps: Listed[Count]
    """Steps of the complete checkpoints."""
    problems: Listed[str]
    """What could not be read."""


class LeftOver(Declared):
    """How far a node's part of the last step has come to one durable tier."""

    tier: str
    arrived: bool
    """Whether the step is durable there."""
    newest_step: Count | None
    """The newest durable step there."""
    left_ranks: Listed[Count]
    """Ranks whose part is not there."""
    left_bytes: Bytes
    error: str
    """Why; empty: for want of time."""


class FinalSave(ByCoordinator):
    """The job ends, and its newest step goes to the durable tiers."""

    event: Literal["final_save"] = "final_save"
    was = ("homecoming",)
    save_id: str = ""
    """Name of the snapshots."""
    step: Count | None
    """The newest step that all ranks hold; null: there is none."""
    made: Count
    """The newest step that was made."""
    nodes: Listed[Count]
    """Nodes that have a part in it."""


class Uploading(ByAgent):
    """A node is still uploading its part of the last step; written every two seconds."""

    event: Literal["uploading"] = "uploading"
    was = ("draining",)
    save_id: str
    seconds_left: Seconds
    tiers: Listed[LeftOver]


class Uploaded(ByAgent):
    """A node has uploaded its part of the last step, or its time is up."""

    event: Literal["uploaded"] = "uploaded"
    was = ("drained",)
    save_id: str = ""
    in_time: bool
    limit_s: Seconds
    """How long it had."""
    tiers: Listed[LeftOver]
