"""RestartPolicy: recovery from faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.detection import HangPolicy, HealthPolicy, NanPolicy


class RestartPolicy(Config):
    """Recovery from faults, and its limits."""

    policy: Literal["wait", "continue"] = "wait"
    """Action of healthy ranks after the loss of a rank or node: `wait` for its replacement; or `continue` with the next
    steps, and let the replacement join between two of them. Each rank must hold the whole state, as with DDP."""
    samples: Literal["constant", "fewer"] = "constant"
    """Samples of a step while ranks are missing, with `policy: continue`: all samples, shared by the remaining ranks;
    or only the micro-batches of those ranks."""
    max_restarts: NonNegativeInt = 10
    """Maximum number of faults that the job recovers from. Processes that die at the same time are one fault. 0: the
    job fails at the first fault."""
    max_restarts_in_window: PositiveInt | None = None
    """Maximum number of faults within `window_s` that the job recovers from. The limit bounds the rate of faults in
    jobs that run for months; `max_restarts` applies too. Default: no limit on the rate."""
    window_s: PositiveFloat = 3600.0
    """Seconds in which `max_restarts_in_window` counts; older faults are ignored."""
    leave_timeout_s: PositiveFloat = 30.0
    """Seconds for a worker to leave its step after a fault of another worker. After that it is killed and replaced."""
    lease_s: Annotated[PositiveFloat, Field(ge=1.0)] = 6.0
    """Seconds after which a node stops by itself if it cannot reach a majority of the nodes. A node that is silent for
    half of this counts as lost."""
    node_wait_s: NonNegativeFloat = 30.0
    """Seconds to wait for a replacement of a lost node if no spare is left. Default on hyperpod-eks with
    `kubernetes.launcher: ours`: 900."""
    form_timeout_s: PositiveFloat = 600.0
    """Seconds for a rank to become ready, at the start and after a fault. After that it is replaced."""
    max_in_process: NonNegativeInt = 3
    """Consecutive exceptions of one rank that are handled in its process. After the next exception, the process is
    replaced."""
    max_on_node: NonNegativeInt = 3
    """Consecutive deaths of one node's processes that are handled on the node; simultaneous deaths count once. After
    the next death, a spare takes the node's ranks."""
    max_node_losses: NonNegativeInt = 3
    """Maximum number of lost nodes that the job recovers from."""
    quarantine_after: PositiveInt = 2
    """Losses of a node after which it is not used again."""
    calm_steps: PositiveInt = 20
    """Faults with fewer steps than this between them count as consecutive."""
    hang: HangPolicy = HangPolicy()
    """Detection of hangs."""
    nan: NanPolicy = NanPolicy()
    """Action for steps with non-finite numbers."""
    health: HealthPolicy = HealthPolicy()
    """Checks of a node before a worker starts on it."""
    compare_replicas_every: NonNegativeInt = 100
    """Steps between comparisons of checksums among ranks with equal state; the first step is also compared. 0:
    never."""
    preload: tuple[str, ...] = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
    """Modules that each node imports once in advance. Replacement workers are forked after these imports, which take
    most of the time of a restart. The modules must not use a GPU. A module that starts a thread is imported by each
    worker instead. For a package with lazy parts, name the parts: `trl.GRPOTrainer`."""
    warm_spares: bool = False
    """Keep a spare process with a CUDA context for each worker with a GPU, which replaces it when it dies. Each spare
    process needs a context's memory on the GPU. Setting CUDA_VISIBLE_DEVICES in the script has no effect: the process
    has its CUDA context already. Tested on one GPU, not on several."""
