"""Events of the job as a whole, of generations, and of steps."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator, ByWorker, JobTime
from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Listed, Port, Seconds


class LogBegun(ByCoordinator):
    """First line of every log."""

    event: Literal["log"] = "log"
    version: Count
    """Version of the log. A log without this line has version 1."""
    epoch: float | None = None
    """Unix time at 0 of the log's clock; null if the job has a single log."""


class JobStarted(ByCoordinator):
    """The first coordinator has begun the job."""

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
    """SHA-256 of the rank's final state; empty if the rank registered no state."""


class Tuned(ByCoordinator):
    """The coordinator has changed a tier's checkpoint interval."""

    event: Literal["tuned"] = "tuned"
    tier: str
    every_steps: Count | None = None
    every_seconds: Seconds | None = None


class MetricsShown(ByCoordinator):
    """The job's metrics are served over HTTP."""

    event: Literal["metrics_shown"] = "metrics_shown"
    host: str
    port: Port


class MetricsFailed(ByCoordinator):
    """The job's metrics cannot be served over HTTP."""

    event: Literal["metrics_failed"] = "metrics_failed"
    cause: str


# --- generations and steps ------------------------------------------------------------------------


class WorkerStarted(ByAgent):
    """A worker process was forked, or a warm spare has become a worker."""

    event: Literal["worker_started"] = "worker_started"
    rank: Count
    pid: Count
    warm: bool = False
    """Whether the process had a CUDA context before it got its rank (`restart.warm_spares`)."""
    script: str = ""
    """Checksum of the script when the process started; empty if the file did not exist."""


class Imported(ByAgent):
    """A node's fork server has imported the modules in `preload`."""

    event: Literal["imported"] = "imported"
    seconds: Seconds
    notes: Listed[str] = ()
    """Sentences about modules that are not preloaded, or only partly."""


class Joined(ByCoordinator):
    """A rank waits for the next generation. Unsampled ranks write this event only after a change of process or
    number."""

    event: Literal["joined"] = "joined"
    rank: Count
    pid: Count
    live_step: Count | None = None
    """The step of the complete state that the rank still holds; null if it holds none."""


class Generation(ByCoordinator):
    """All ranks have joined, and the step to restore is chosen."""

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
    """Source of the state: live, self, memory, peer, parity, fresh, durable, or script. With script, the script loads
    its own checkpoint. Logs of earlier versions have the kind of the durable tier here."""
    tier: str = ""
    """Kind of the durable tier from which the state came."""
    bytes_moved: Bytes = 0
    """Number of bytes from other nodes."""
    bytes_local: Bytes = 0
    """Number of bytes from the rank's own node."""
    unbound: bool = False
    """Whether the checkpoint has no MACs of its files, because an earlier version wrote it."""

    @property
    def came_from(self) -> str:
        """The source of the state, or the kind of the durable tier it came from."""
        return self.tier or self.source


class RestoreFailed(ByCoordinator):
    """A rank could not restore from its source. All ranks try the next source."""

    event: Literal["restore_failed"] = "restore_failed"
    rank: Count
    attempt: Count = 1
    error: str


class ParityShort(ByCoordinator):
    """A parity group has lost two or more nodes at once, so all ranks restore an older step from the next tier."""

    event: Literal["parity_short"] = "parity_short"
    step: Count
    """The newest step for which parity exists."""
    ranks: Listed[Count]
    """Ranks of the group whose snapshots are missing. Parity can rebuild only one of them."""
    restored_step: Count


class Go(ByCoordinator):
    """All ranks have restored and continue, and repeat the steps after `step`."""

    event: Literal["go"] = "go"
    step: Count
    checkpoint: str = ""
    """Name of the restored durable checkpoint. Empty if the state came from memory or is new."""


class Begun(ByWorker):
    """A rank has begun its training loop."""

    event: Literal["begun"] = "begun"
    generation: Count
    step: Count
    """The step before the rank's first step in this loop."""
    of: Count | None = None
    """The last step of the job."""
    sharing: str = ""
    """How the states of ranks relate: same, own or shard; empty if not known yet."""
    loaded: Count | None = None
    """Step of the checkpoint that a script with `mode: run` has loaded itself; null if unknown or if it loaded none."""
    reproducible: bool = False
    """Whether gradient sums are independent of the order of summation, as with `reproducible=True`."""


class Kept(ByWorker):
    """Contents of a rank's snapshots at the start of its loop. Rank 0 writes this event, again after each change."""

    event: Literal["kept"] = "kept"
    objects: dict[str, str]
    """Objects passed to `run.restore`: the class of each, by name."""
    left_out: Listed[str] = ()
    """Classes of the objects passed to `run.leave_out`."""


class Unsaved(ByWorker):
    """Objects that are in no snapshot changed during the first two steps."""

    event: Literal["unsaved"] = "unsaved"
    objects: Listed[str]
    """Names of the objects in the script, each with its class."""
    descriptive: Listed[str] = ()
    """Names of the objects that probably only describe training, such as counters."""
    unseeded: Listed[str] = ()
    """DataLoaders without a generator of their own, each with its class."""


UNPROTECTED = (
    "no @resilient function is running, so hyperpod_ext does not save this training, and a fault ends the job. Choose "
    "one: train in a @resilient function, or with an adapter of docs/integrations.md; write `mode: run` for a script "
    "that saves and resumes by itself; or write `mode: plain` for a job without recovery."
)


class UnprotectedStep(ByAgent):
    """A rank makes an optimizer step while its process runs no `@resilient` function, so no snapshot saves the step.
    Written once per node."""

    event: Literal["unprotected_step"] = "unprotected_step"
    rank: Count
    """The rank that makes the optimizer step."""

    @property
    def warning(self) -> str:
        """The warning for users about this event."""
        return f"rank {self.rank} makes an optimizer step, but {UNPROTECTED}"


class Step(ByWorker):
    """A rank has made a step. The script's metrics of the step are additional fields, each a number or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["step"] = "step"
    generation: Count
    step: Count
    of: Count | None = None
    """The last step of the job."""
    began: JobTime
    """Start time of the step, by the same clock as `t`."""
    data_s: Seconds = 0.0
    """Time from the start of the step to the first forward pass."""
    checkpoint_s: Seconds = 0.0
    """Time that the training thread waited for a snapshot."""
    snapshot: Count = 0
    """1 if a snapshot of this step was made."""

    @property
    def took(self) -> float:
        """Duration of the step, in seconds."""
        return self.t - self.began

    @property
    def logged(self) -> dict[str, float | None]:
        """Metrics of the step that the script logged."""
        return self.__pydantic_extra__


ALL_SAMPLED_UP_TO = 64
"""Ranks below this number have every step in the log. If all of 8,192 ranks wrote their steps, each step would add half
a megabyte, too much to read after a month."""
SAMPLED_ONE_IN = 129
"""Of the higher ranks, one in this many is sampled. The number is odd, so that every local rank occurs."""


def is_sampled(rank: int) -> bool:
    """Return whether a log has every step of `rank`."""
    return rank < ALL_SAMPLED_UP_TO or rank % SAMPLED_ONE_IN == 0


def count_sampled(world_size: int) -> int:
    """Return the number of ranks of a job whose steps are all logged."""
    return min(world_size, ALL_SAMPLED_UP_TO) + max(0, world_size - 1) // SAMPLED_ONE_IN


class Metric(ByWorker):
    """The script has logged metrics outside of a step, each a number or null."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["metric"] = "metric"

    @property
    def logged(self) -> dict[str, float | None]:
        """Metrics that the script logged."""
        return self.__pydantic_extra__


class Skipped(ByWorker):
    """The NaN guard has skipped the optimizer in one step."""

    event: Literal["skipped"] = "skipped"
    step: Count
    cause: str


class Stopped(ByWorker):
    """A rank has stopped because its launcher restarts the job with different nodes."""

    event: Literal["stopped"] = "stopped"
    step: Count
