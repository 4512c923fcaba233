"""Events of the job as a whole, of generations, and of steps."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, JobTime
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Listed, Port, Seconds


class LogBegun(ByCoordinator):
    """First line of every event log."""

    event: Literal["log"] = "log"
    version: Count
    """Version of the log's format. A log without this line has version 1."""
    epoch: float | None = None
    """Unix time, in seconds, when the log's clock was 0. The time is null in the log of the run directory."""


class JobStarted(ByCoordinator):
    """The first coordinator has started the job."""

    event: Literal["job_started"] = "job_started"
    world_size: Count
    """Number of ranks."""
    nodes: Count
    """Number of nodes, without spares."""
    spares: Count
    """Number of spare nodes."""


class JobEnded(ByCoordinator):
    """The job has ended."""

    event: Literal["job_ended"] = "job_ended"
    state: Literal["succeeded", "failed", "cancelled"]


class Done(ByCoordinator):
    """A rank's training function has returned."""

    event: Literal["done"] = "done"
    rank: Count
    digest: str
    """SHA-256 of the rank's final state. The digest is empty if the rank has registered no state."""


class Tuned(ByCoordinator):
    """The coordinator has changed a tier's checkpoint interval."""

    event: Literal["tuned"] = "tuned"
    tier: str
    every_steps: Count | None = None
    every_seconds: Seconds | None = None


class MetricsShown(ByCoordinator):
    """The job's metrics are now served over HTTP."""

    event: Literal["metrics_shown"] = "metrics_shown"
    host: str
    port: Port


class MetricsFailed(ByCoordinator):
    """The job's metrics could not be served over HTTP."""

    event: Literal["metrics_failed"] = "metrics_failed"
    cause: str


# --- generations and steps ------------------------------------------------------------------------


class WorkerStarted(ByAgent):
    """A worker process was forked, or a warm spare process has become a worker."""

    event: Literal["worker_started"] = "worker_started"
    rank: Count
    pid: Count
    warm: bool = False
    """Whether the process had a CUDA context before it got its rank (`restart.warm_spares`)."""
    script: str = ""
    """Checksum of the training script when the process started; empty if the file did not exist."""


class Imported(ByAgent):
    """A node's fork server has imported the modules in `preload`."""

    event: Literal["imported"] = "imported"
    seconds: Seconds
    notes: Listed[str] = ()
    """Sentences about modules that were not imported, or only partly."""


class Joined(ByCoordinator):
    """A rank waits for the next generation. A rank whose steps are not all logged writes this event only when it has a
    new process or a new rank number."""

    event: Literal["joined"] = "joined"
    rank: Count
    pid: Count
    live_step: Count | None = None
    """The step whose complete state the rank still has; null if it has none."""


class Generation(ByCoordinator):
    """All ranks have joined a new generation, and the step to restore is chosen."""

    event: Literal["generation"] = "generation"
    generation: Count
    step: Count
    world_size: Count | None = None
    """Number of ranks in the generation."""


class GroupsOpen(ByWorker):
    """A rank has opened its process groups."""

    event: Literal["groups_open"] = "groups_open"


class Restored(ByWorker):
    """A rank has restored its state."""

    event: Literal["restored"] = "restored"
    step: Count
    source: str
    """Source of the state: live, self, memory, peer, parity, fresh, durable, or script (the script loads its own
    checkpoint). In logs of earlier versions, `source` may also be the kind of a durable tier."""
    tier: str = ""
    """Kind of the durable tier from which the state came; empty for any other source."""
    bytes_moved: Bytes = 0
    """Number of bytes restored from other nodes."""
    bytes_local: Bytes = 0
    """Number of bytes restored from the rank's own node."""
    unbound: bool = False
    """Whether the checkpoint has no MACs (signatures) of its files, because an earlier version wrote it."""

    @property
    def came_from(self) -> str:
        """The kind of the durable tier from which the state came; for any other source, the source."""
        return self.tier or self.source


class RestoreFailed(ByCoordinator):
    """A rank could not restore from its source. All ranks restore again, from the next source."""

    event: Literal["restore_failed"] = "restore_failed"
    rank: Count
    attempt: Count = 1
    error: str


class ParityShort(ByCoordinator):
    """A parity group has lost two or more nodes at once, so all ranks restore an older step from another tier."""

    event: Literal["parity_short"] = "parity_short"
    step: Count
    """The newest step for which parity exists."""
    ranks: Listed[Count]
    """Ranks of the group whose snapshots are missing. Parity can rebuild the snapshot of only one rank."""
    restored_step: Count


class Go(ByCoordinator):
    """All ranks have restored, and continue with the step after `step`."""

    event: Literal["go"] = "go"
    step: Count
    checkpoint: str = ""
    """Name of the durable checkpoint that was restored. The name is empty if the state came from memory or is new."""


class Begun(ByWorker):
    """A rank has begun its training loop."""

    event: Literal["begun"] = "begun"
    generation: Count
    step: Count
    """The step before the first step of this loop."""
    of: Count | None = None
    """Number of the job's last step; null if unknown."""
    sharing: str = ""
    """How the ranks' states are related: same, own or shard; empty if not known yet."""
    loaded: Count | None = None
    """Step of the checkpoint that a script in `mode: run` has loaded itself. The step is null if it is unknown, or if
    the script loaded no checkpoint."""
    reproducible: bool = False
    """Whether sums of gradients do not depend on the order of summation, as with `reproducible=True`."""


class Kept(ByWorker):
    """The contents of a rank's snapshots. Rank 0 writes this event at the start of its loop, and after each change."""

    event: Literal["kept"] = "kept"
    objects: dict[str, str]
    """Class of each object passed to `run.restore`, by the object's name."""
    left_out: Listed[str] = ()
    """Class of each object passed to `run.leave_out`."""


class Unsaved(ByWorker):
    """Objects that no snapshot contains have changed during the first two steps."""

    event: Literal["unsaved"] = "unsaved"
    objects: Listed[str]
    """Names of the objects in the script, each with its class."""
    descriptive: Listed[str] = ()
    """Names of the objects among `objects` that probably only describe the training, such as counters."""
    unseeded: Listed[str] = ()
    """DataLoaders that have no generator of their own, each with its class."""


UNPROTECTED = (
    "no @resilient function is running, so hyperpod_ext does not save this training, and a fault ends the job. Choose "
    "one: train in a @resilient function, or with an adapter of docs/integrations.md; write `mode: run` for a script "
    "that saves and resumes by itself; or write `mode: plain` for a job without recovery."
)


class UnprotectedStep(ByAgent):
    """A rank makes an optimizer step while its process runs no `@resilient` function, so no snapshot saves the step.
    This event is written once per node."""

    event: Literal["unprotected_step"] = "unprotected_step"
    rank: Count
    """The rank that makes the optimizer step."""

    @property
    def warning(self) -> str:
        """A warning about this event, for users."""
        return f"rank {self.rank} makes an optimizer step, but {UNPROTECTED}"


class Step(ByWorker):
    """A rank has made a step. The metrics that the script logged in the step are additional fields: a number or null
    each."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["step"] = "step"
    generation: Count
    step: Count
    of: Count | None = None
    """Number of the job's last step; null if unknown."""
    began: JobTime
    """Start time of the step, by the same clock as `t`."""
    data_s: Seconds = 0.0
    """Time from the start of the step to its first forward pass."""
    checkpoint_s: Seconds = 0.0
    """Time that the training thread waited for a snapshot."""
    snapshot: Count = 0
    """1 if a snapshot of this step was made, else 0."""

    @property
    def took(self) -> float:
        """Duration of the step, in seconds."""
        return self.t - self.began

    @property
    def logged(self) -> dict[str, float | None]:
        """Metrics that the script logged in the step, by name."""
        return self.__pydantic_extra__


ALL_SAMPLED_UP_TO = 64
"""Ranks below `ALL_SAMPLED_UP_TO` write all their steps to the log. If all ranks of a job with 8,192 ranks wrote their
steps, each step would add half a megabyte: after a month the log would be too large to read."""
SAMPLED_ONE_IN = 129
"""Of the ranks from `ALL_SAMPLED_UP_TO` on, one in `SAMPLED_ONE_IN` ranks writes its steps. The number is odd, so that
each local rank occurs."""


def is_sampled(rank: int) -> bool:
    """Return whether the log has every step of `rank` (the rank is sampled)."""
    return rank < ALL_SAMPLED_UP_TO or rank % SAMPLED_ONE_IN == 0


def count_sampled(world_size: int) -> int:
    """Return the number of a job's ranks that write all their steps to the log."""
    return min(world_size, ALL_SAMPLED_UP_TO) + max(0, world_size - 1) // SAMPLED_ONE_IN


class Metric(ByWorker):
    """The script has logged metrics outside of a step. Each metric is an additional field: a number or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["metric"] = "metric"

    @property
    def logged(self) -> dict[str, float | None]:
        """Metrics that the script logged, by name."""
        return self.__pydantic_extra__


class Skipped(ByWorker):
    """The NaN guard has skipped the optimizer step of one step."""

    event: Literal["skipped"] = "skipped"
    step: Count
    cause: str


class Stopped(ByWorker):
    """A rank has stopped, because its launcher will restart the job with a different number of nodes."""

    event: Literal["stopped"] = "stopped"
    step: Count
