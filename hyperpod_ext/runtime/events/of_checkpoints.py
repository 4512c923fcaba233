"""Events of checkpoints: copies to other tiers, and the upload of the last step."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Declared, Listed, Seconds


class Copying(ByAgent):
    """The counters of a node's copies to one tier have changed."""

    event: Literal["copying"] = "copying"
    tier: str
    """The tier: `peer`, or the URL of a durable tier."""
    failed: Count = 0
    """Number of copies that failed since the memory server started."""
    skipped: Count = 0
    """Number of copies that were skipped, because an earlier copy was still running."""
    superseded: Count = 0
    """Number of copies that were cancelled in favour of newer copies."""
    last_error: str | None = None
    newest_step: Count | None = None
    """The newest step that the tier has; null if it has none."""
    fell_back: str = ""
    """Why copies to peers use TCP although NIXL is configured; empty if no such fallback to TCP has happened."""


class ScriptSaved(ByWorker):
    """A script in `mode: run` has saved a file or a checkpoint folder."""

    event: Literal["script_saved"] = "script_saved"
    step: Count
    """The newest optimizer step that the rank had made when it saved."""
    path: str


class SavesSetAside(ByWorker):
    """A rank in `mode: run` has renamed saves that are newer than the newest step saved by all ranks."""

    event: Literal["saves_set_aside"] = "saves_set_aside"
    step: Count
    """The newest step that all ranks have saved. 0 if there is none, so that the script starts from the beginning."""
    paths: Listed[str]
    """Paths of the saves before they were renamed."""

    @property
    def text(self) -> str:
        """A sentence about this event, for users."""
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        newest = (
            f"step {self.step} is the newest that all ranks have saved"
            if self.step
            else "no step was saved by all ranks"
        )
        return f"{newest}, so rank {self.rank} has set {self.paths[0]}{more} aside"


class Durable(ByCoordinator):
    """The coordinator has searched the durable tiers for checkpoints."""

    event: Literal["durable"] = "durable"
    node: Count | None = None
    """The node whose own disks were searched; null for tiers that all nodes share."""
    steps: Listed[Count]
    """Steps of all complete checkpoints."""
    problems: Listed[str]
    """Sentences about checkpoints that could not be read."""


class LeftOver(Declared):
    """One node's upload of its part of the last step to one durable tier."""

    tier: str
    arrived: bool
    """Whether the last step is durable in the tier: all nodes have uploaded their parts."""
    newest_step: Count | None
    """The newest durable step in the tier; null if there is none."""
    left_ranks: Listed[Count]
    """Ranks of this node whose part is missing in the tier."""
    left_bytes: Bytes
    error: str
    """Why the part is missing. The reason is empty if no part is missing, or if the time limit was reached."""


class FinalSave(ByCoordinator):
    """The job ends, and its nodes upload their parts of the newest step to the durable tiers."""

    event: Literal["final_save"] = "final_save"
    was = ("homecoming",)
    save_id: str = ""
    """Name of the save (generation and step) whose snapshots are uploaded."""
    step: Count | None
    """The newest step of which all ranks have a snapshot; null if there is none."""
    made: Count
    """The newest step that the job has made."""
    nodes: Listed[Count]
    """Nodes that hold a part of the step to upload."""


class Uploading(ByAgent):
    """A node is still uploading its part of the last step. The event is repeated every two seconds."""

    event: Literal["uploading"] = "uploading"
    was = ("draining",)
    save_id: str
    seconds_left: Seconds
    tiers: Listed[LeftOver]


class Uploaded(ByAgent):
    """A node has uploaded its part of the last step, or its time limit has passed."""

    event: Literal["uploaded"] = "uploaded"
    was = ("drained",)
    save_id: str = ""
    in_time: bool
    limit_s: Seconds
    """The time limit of the upload."""
    tiers: Listed[LeftOver]
