"""Events of checkpoints: copies to other tiers, and the upload of the last step."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Declared, Listed, Seconds


class Copying(ByAgent):
    """The counters of a node's copies to another tier have changed."""

    event: Literal["copying"] = "copying"
    tier: str
    """`peer`, or the URL of a durable tier."""
    failed: Count = 0
    """Copies that failed since the memory server started."""
    skipped: Count = 0
    """Copies skipped because the one before was still running."""
    superseded: Count = 0
    """Copies cancelled for newer ones."""
    last_error: str | None = None
    newest_step: Count | None = None
    """The newest step in the tier; null: none."""
    fell_back: str = ""
    """Why copies to peers use TCP although NIXL is configured."""


class ScriptSaved(ByWorker):
    """A script of mode `run` has saved a file or a checkpoint folder."""

    event: Literal["script_saved"] = "script_saved"
    step: Count
    """Newest optimizer step that the rank had made."""
    path: str


class Durable(ByCoordinator):
    """The durable tiers were searched for checkpoints."""

    event: Literal["durable"] = "durable"
    node: Count | None = None
    """Node whose own disks were searched; null for tiers that all nodes share."""
    steps: Listed[Count]
    """Steps of the complete checkpoints."""
    problems: Listed[str]
    """Sentences on checkpoints that could not be read."""


class LeftOver(Declared):
    """Progress of one node's part of the last step in one durable tier."""

    tier: str
    arrived: bool
    """Whether the step is durable in the tier."""
    newest_step: Count | None
    """The newest durable step in the tier."""
    left_ranks: Listed[Count]
    """Ranks whose part is missing in the tier."""
    left_bytes: Bytes
    error: str
    """Why the part is missing; empty: the time was up."""


class FinalSave(ByCoordinator):
    """The job ends, and its nodes upload the newest step to the durable tiers."""

    event: Literal["final_save"] = "final_save"
    was = ("homecoming",)
    save_id: str = ""
    """Name of the snapshots."""
    step: Count | None
    """The newest step that all ranks hold; null: none."""
    made: Count
    """The newest step made."""
    nodes: Listed[Count]
    """Nodes that hold a part of the step."""


class Uploading(ByAgent):
    """A node is still uploading its part of the last step; written every two seconds."""

    event: Literal["uploading"] = "uploading"
    was = ("draining",)
    save_id: str
    seconds_left: Seconds
    tiers: Listed[LeftOver]


class Uploaded(ByAgent):
    """A node has uploaded its part of the last step, or has run out of time."""

    event: Literal["uploaded"] = "uploaded"
    was = ("drained",)
    save_id: str = ""
    in_time: bool
    limit_s: Seconds
    """The time limit of the upload."""
    tiers: Listed[LeftOver]
