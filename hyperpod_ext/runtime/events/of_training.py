"""Events of the job as a whole, and of ranks: generations and steps."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, JobTime
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Listed, Port, Seconds


class LogBegun(ByCoordinator):
    """The first line of a log."""

    event: Literal["log"] = "log"
    version: Count
    """Version of the log. Logs without this line are of version 1."""
    epoch: float | None = None
    """Unix time at 0 of the log's clock; null: one log is all there is of its job."""


class JobStarted(ByCoordinator):
    """The first coordinator begins."""

    event: Literal["job_started"] = "job_started"
    world_size: Count
    """Ranks."""
    nodes: Count
    """Nodes, without spares."""
    spares: Count
    """Spare nodes."""


class JobEnded(ByCoordinator):
    """The job is over."""

    event: Literal["job_ended"] = "job_ended"
    state: Literal["succeeded", "failed", "cancelled"]


class Done(ByCoordinator):
    """A rank's training function has returned."""

    event: Literal["done"] = "done"
    rank: Count
    digest: str
    """SHA-256 of its final state; empty: it registered none."""


class Tuned(ByCoordinator):
    """The interval of a tier was changed."""

    event: Literal["tuned"] = "tuned"
    tier: str
    every_steps: Count | None = None
    every_seconds: Seconds | None = None


class MetricsShown(ByCoordinator):
    """The job's numbers can be read over HTTP."""

    event: Literal["metrics_shown"] = "metrics_shown"
    host: str
    port: Port


class MetricsFailed(ByCoordinator):
    """The job's numbers cannot be read over HTTP."""

    event: Literal["metrics_failed"] = "metrics_failed"
    cause: str


# --- generations and steps ------------------------------------------------------------------------


class WorkerStarted(ByAgent):
    """A worker process was forked, or became of a warm spare."""

    event: Literal["worker_started"] = "worker_started"
    rank: Count
    pid: Count
    warm: bool = False
    """Whether it had a CUDA context when it was wanted (`restart.warm_spares`)."""
    script: str = ""
    """Checksum of the script as it was then; empty: there is no such file."""


class Imported(ByAgent):
    """The fork server of a node has imported what `preload` names."""

    event: Literal["imported"] = "imported"
    seconds: Seconds
    notes: Listed[str] = ()
    """Sentences on modules that are not preloaded, or not much of them."""


class Joined(ByCoordinator):
    """A rank waits for the next generation. Of ranks that are not sampled: another process than before, or the same
    under another number."""

    event: Literal["joined"] = "joined"
    rank: Count
    pid: Count
    live_step: Count | None = None
    """The step of the complete state that it still has; null: it has none."""


class Generation(ByCoordinator):
    """All ranks have joined; the step to go on from is chosen."""

    event: Literal["generation"] = "generation"
    generation: Count
    step: Count
    world_size: Count | None = None
    """Ranks of the generation."""


class GroupsOpen(ByWorker):
    """A rank has opened its process groups."""

    event: Literal["groups_open"] = "groups_open"


class Restored(ByWorker):
    """A rank has its state."""

    event: Literal["restored"] = "restored"
    step: Count
    source: str
    """Source of the state: live, self, memory, peer, parity, fresh, or durable. Logs of earlier versions have the kind
    of the durable tier here."""
    tier: str = ""
    """Kind of the durable tier."""
    bytes_moved: Bytes = 0
    """From other nodes."""
    bytes_local: Bytes = 0
    """From its own node."""
    unbound: bool = False
    """Whether the checkpoint has no MAC of its files: an earlier version wrote it."""

    @property
    def came_from(self) -> str:
        """The source, or the kind of the durable tier."""
        return self.tier or self.source


class RestoreFailed(ByCoordinator):
    """A rank has refused its source; all ranks try the next one."""

    event: Literal["restore_failed"] = "restore_failed"
    rank: Count
    attempt: Count = 1
    error: str


class ParityShort(ByCoordinator):
    """Two nodes or more of one parity group are lost at once: all go on from an older step, of the next tier."""

    event: Literal["parity_short"] = "parity_short"
    step: Count
    """The newest that has parity."""
    ranks: Listed[Count]
    """Those of the group whose snapshots of it are missing; parity makes up for one."""
    restored_step: Count


class Go(ByCoordinator):
    """All ranks have restored and go on; steps after `step` are made again."""

    event: Literal["go"] = "go"
    step: Count
    checkpoint: str = ""
    """The durable checkpoint that the state is from; empty: it is from some memory, or new."""


class Begun(ByWorker):
    """A rank begins its training loop."""

    event: Literal["begun"] = "begun"
    generation: Count
    step: Count
    """The step before the first that it will make."""
    of: Count | None = None
    """The job's last step."""
    sharing: str = ""
    """How states of ranks relate: same, own or shard; empty: it is not known yet."""
    reproducible: bool = False
    """Whether gradients are summed without an order, as with `reproducible=True`."""


class Kept(ByWorker):
    """What a rank's snapshots hold, as its loop begins: told by rank 0, and again where that has changed."""

    event: Literal["kept"] = "kept"
    objects: dict[str, str]
    """What was handed to `run.restore`: class by name."""
    left_out: Listed[str] = ()
    """Classes of what `run.leave_out` was given."""


class Unsaved(ByWorker):
    """Something changed in the first two steps that is in no snapshot: state of the training, or what describes it."""

    event: Literal["unsaved"] = "unsaved"
    objects: Listed[str]
    """Where the script has it, each with its class."""
    descriptive: Listed[str] = ()
    """Those of them that only describe training, by all appearances."""
    unseeded: Listed[str] = ()
    """DataLoaders without a generator of their own, each with its class."""


class Step(ByWorker):
    """A rank has made a step. What the script logs of the step stands beside these fields: a number or null each."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["step"] = "step"
    generation: Count
    step: Count
    of: Count | None = None
    """The job's last step."""
    began: JobTime
    """When the step began, of the same clock as `t`."""
    data_s: Seconds = 0.0
    """From its beginning to the first forward pass."""
    checkpoint_s: Seconds = 0.0
    """For how long the training thread waited for a snapshot."""
    snapshot: Count = 0
    """1: a snapshot of this step was made."""

    @property
    def took(self) -> float:
        """Seconds."""
        return self.t - self.began

    @property
    def logged(self) -> dict[str, float | None]:
        """What the script logged."""
        return self.__pydantic_extra__


ALL_SAMPLED_UP_TO = 64
"""Ranks from 0 on whose steps a log has. Those of 8,192 would be half a megabyte a step, and nobody could read a month
of them."""
SAMPLED_ONE_IN = 129
"""Of the ranks after them. Odd: ranks of each number on their nodes are among them."""


def is_sampled(rank: int) -> bool:
    """Whether a log has every step of `rank`."""
    return rank < ALL_SAMPLED_UP_TO or rank % SAMPLED_ONE_IN == 0


def count_sampled(world_size: int) -> int:
    """How many of a job's ranks are sampled."""
    return min(world_size, ALL_SAMPLED_UP_TO) + max(0, world_size - 1) // SAMPLED_ONE_IN


class Metric(ByWorker):
    """The script logged numbers outside of steps: a number or null each."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["metric"] = "metric"

    @property
    def logged(self) -> dict[str, float | None]:
        """What the script logged."""
        return self.__pydantic_extra__


class Skipped(ByWorker):
    """The NaN guard left out the optimizer's part of a step."""

    event: Literal["skipped"] = "skipped"
    step: Count
    cause: str


class Stopped(ByWorker):
    """A rank has stopped because another launcher starts the job with other nodes."""

    event: Literal["stopped"] = "stopped"
    step: Count
