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
    """Unix time at 0 of the log's clock; null: the job has a single log."""


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
    """A worker process was forked, or made from a warm spare."""

    event: Literal["worker_started"] = "worker_started"
    rank: Count
    pid: Count
    warm: bool = False
    """Whether the process had a CUDA context before it got its rank (`restart.warm_spares`)."""
    script: str = ""
    """Checksum of the script at that time; empty: no such file."""


class Imported(ByAgent):
    """The fork server of a node has imported the modules in `preload`."""

    event: Literal["imported"] = "imported"
    seconds: Seconds
    notes: Listed[str] = ()
    """Sentences on modules that are not preloaded, or only in part."""


class Joined(ByCoordinator):
    """A rank waits for the next generation. Ranks that are not sampled write it only with a new process or number."""

    event: Literal["joined"] = "joined"
    rank: Count
    pid: Count
    live_step: Count | None = None
    """The step of the complete state that the rank still holds; null: none."""


class Generation(ByCoordinator):
    """All ranks have joined; the step to restore is chosen."""

    event: Literal["generation"] = "generation"
    generation: Count
    step: Count
    world_size: Count | None = None
    """Ranks of the generation."""


class GroupsOpen(ByWorker):
    """A rank has opened its process groups."""

    event: Literal["groups_open"] = "groups_open"


class Restored(ByWorker):
    """A rank has restored its state."""

    event: Literal["restored"] = "restored"
    step: Count
    source: str
    """Source of the state: live, self, memory, peer, parity, fresh, durable, or script (loads its own checkpoint). Logs
    of earlier versions have the kind of the durable tier here."""
    tier: str = ""
    """Kind of the durable tier."""
    bytes_moved: Bytes = 0
    """Bytes from other nodes."""
    bytes_local: Bytes = 0
    """Bytes from its own node."""
    unbound: bool = False
    """Whether the checkpoint lacks MACs of its files: an earlier version wrote it."""

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
    """Two or more nodes of one parity group were lost at once: all ranks restore an older step from the next tier."""

    event: Literal["parity_short"] = "parity_short"
    step: Count
    """The newest step with parity."""
    ranks: Listed[Count]
    """Ranks of the group with missing snapshots; parity can rebuild only one."""
    restored_step: Count


class Go(ByCoordinator):
    """All ranks have restored and continue; steps after `step` are repeated."""

    event: Literal["go"] = "go"
    step: Count
    checkpoint: str = ""
    """The restored durable checkpoint; empty: the state is from memory, or new."""


class Begun(ByWorker):
    """A rank begins its training loop."""

    event: Literal["begun"] = "begun"
    generation: Count
    step: Count
    """The step before the rank's first one."""
    of: Count | None = None
    """The job's last step."""
    sharing: str = ""
    """How states of ranks relate: same, own or shard; empty: not known yet."""
    loaded: Count | None = None
    """Step of the checkpoint that a script of mode `run` has loaded itself; null: unknown, or none."""
    reproducible: bool = False
    """Whether gradient sums do not depend on the order, as with `reproducible=True`."""


class Kept(ByWorker):
    """Contents of a rank's snapshots at the start of its loop: written by rank 0, and again after a change."""

    event: Literal["kept"] = "kept"
    objects: dict[str, str]
    """Objects passed to `run.restore`: class by name."""
    left_out: Listed[str] = ()
    """Classes of the objects passed to `run.leave_out`."""


class Unsaved(ByWorker):
    """Objects outside all snapshots changed in the first two steps: training state, or descriptions of training."""

    event: Literal["unsaved"] = "unsaved"
    objects: Listed[str]
    """Their names in the script, each with its class."""
    descriptive: Listed[str] = ()
    """Those among the objects which probably only describe training."""
    unseeded: Listed[str] = ()
    """DataLoaders without their own generator, each with its class."""


UNPROTECTED = (
    "no @resilient function is running, so hyperpod_ext does not save this training, and a fault ends the job. Choose "
    "one: train in a @resilient function, or with an adapter of docs/integrations.md; write `mode: run` for a script "
    "that saves and resumes by itself; or write `mode: plain` for a job without recovery."
)


class UnprotectedStep(ByAgent):
    """A rank makes an optimizer step while its process runs no `@resilient` function, so that nothing saves the step.
    Written once per node."""

    event: Literal["unprotected_step"] = "unprotected_step"
    rank: Count
    """The rank."""

    @property
    def warning(self) -> str:
        """The warning for users."""
        return f"rank {self.rank} makes an optimizer step, but {UNPROTECTED}"


class Step(ByWorker):
    """A rank has made a step. The script's metrics of the step are added as fields: a number or null each."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["step"] = "step"
    generation: Count
    step: Count
    of: Count | None = None
    """The job's last step."""
    began: JobTime
    """Start of the step, by the same clock as `t`."""
    data_s: Seconds = 0.0
    """Time from the step's start to the first forward pass."""
    checkpoint_s: Seconds = 0.0
    """Time that the training thread waited for a snapshot."""
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
"""Number of low ranks with every step in the log. All of 8,192 ranks would write half a megabyte per step: too much to
read after a month."""
SAMPLED_ONE_IN = 129
"""Of higher ranks, one in so many is sampled. An odd number, so that every local rank number occurs."""


def is_sampled(rank: int) -> bool:
    """Return whether a log has every step of `rank`."""
    return rank < ALL_SAMPLED_UP_TO or rank % SAMPLED_ONE_IN == 0


def count_sampled(world_size: int) -> int:
    """Return the number of sampled ranks of a job."""
    return min(world_size, ALL_SAMPLED_UP_TO) + max(0, world_size - 1) // SAMPLED_ONE_IN


class Metric(ByWorker):
    """The script has logged metrics outside of steps: a number or null each."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    event: Literal["metric"] = "metric"

    @property
    def logged(self) -> dict[str, float | None]:
        """What the script logged."""
        return self.__pydantic_extra__


class Skipped(ByWorker):
    """The NaN guard has skipped the optimizer in a step."""

    event: Literal["skipped"] = "skipped"
    step: Count
    cause: str


class Stopped(ByWorker):
    """A rank has stopped because its launcher restarts the job with other nodes."""

    event: Literal["stopped"] = "stopped"
    step: Count
