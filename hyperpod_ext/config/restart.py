"""Section of a job's spec for recovery from faults inside the running job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.detection import HangPolicy, HealthPolicy, NanPolicy


class RestartPolicy(Config):
    """Recovery from faults inside the running job, and the limits of the recovery."""

    policy: Literal["wait", "continue"] = "wait"
    """Action of healthy ranks after the loss of a rank or node. `wait`: the healthy ranks wait for the replacement.
    `continue`: the healthy ranks train the next steps, and the replacement joins between two steps. With `continue`,
    each rank must hold the whole state, as with DDP."""
    samples: Literal["constant", "fewer"] = "constant"
    """Samples of a step while ranks are missing, with `policy: continue`. `constant`: the remaining ranks share all
    samples of the step. `fewer`: the remaining ranks compute only their own micro-batches."""
    max_restarts: NonNegativeInt = 10
    """Maximum number of faults that the job recovers from. Processes that die at the same time count as one fault. 0:
    the job fails at the first fault."""
    max_restarts_in_window: PositiveInt | None = None
    """Maximum number of faults within `window_s` seconds that the job recovers from. `max_restarts_in_window` limits
    the rate of faults in jobs that run for months; the limit `max_restarts` also applies. Default: no limit on the
    rate."""
    window_s: PositiveFloat = 3600.0
    """Seconds for which `max_restarts_in_window` counts a fault. Older faults are ignored."""
    leave_timeout_s: PositiveFloat = 30.0
    """Seconds that a worker gets to leave its step after a fault of another worker. A worker that needs longer is
    killed and replaced."""
    lease_s: Annotated[PositiveFloat, Field(ge=1.0)] = 6.0
    """Seconds without contact to a majority of the nodes after which a node stops its own processes. The job treats a
    node as lost if the node sends nothing for half of `lease_s`."""
    node_wait_s: NonNegativeFloat = 30.0
    """Seconds to wait for a replacement of a lost node if the job has no spare left. Default on hyperpod-eks with
    `kubernetes.launcher: ours`: 900."""
    form_timeout_s: PositiveFloat = 600.0
    """Seconds that a rank gets to become ready, at the start of the job and after a fault. A rank that needs longer is
    replaced."""
    max_in_process: NonNegativeInt = 3
    """Maximum number of consecutive exceptions of one rank after which the rank's process is kept. If the rank raises
    once more, its process is replaced."""
    max_on_node: NonNegativeInt = 3
    """Maximum number of consecutive process deaths on one node after which the node's ranks stay on the node.
    Simultaneous deaths count once. If one more process dies, a spare node takes over the node's ranks."""
    max_node_losses: NonNegativeInt = 3
    """Maximum number of lost nodes that the job recovers from."""
    quarantine_after: PositiveInt = 2
    """Number of losses of the same node after which the job does not use the node again."""
    calm_steps: PositiveInt = 20
    """Number of steps without a fault that ends a series of consecutive faults. Faults with fewer steps between them
    count as consecutive."""
    hang: HangPolicy = HangPolicy()
    """Detection of hangs."""
    nan: NanPolicy = NanPolicy()
    """Action for steps with non-finite numbers."""
    health: HealthPolicy = HealthPolicy()
    """Health checks of a node before a worker starts on it."""
    compare_replicas_every: NonNegativeInt = 100
    """Steps between two comparisons of state checksums among ranks that hold the same state. The first step is also
    compared. 0: never."""
    preload: tuple[str, ...] = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
    """Python modules that one process on each node imports in advance. Replacement workers are forked from the process
    with the imports, because imports would take most of the time of a restart. The modules must not use a GPU. A module
    that starts a thread is imported by each worker instead. For a package with lazy imports, name the attributes that
    the script uses, such as `trl.GRPOTrainer`."""
    warm_spares: bool = False
    """Whether to keep a spare process with a CUDA context for each worker with a GPU. The spare process replaces the
    worker when the worker dies. Each spare process needs GPU memory for its CUDA context. With `warm_spares`, setting
    CUDA_VISIBLE_DEVICES in the script has no effect, because the process has its CUDA context already. Warm spares were
    tested on one GPU, not on several."""
