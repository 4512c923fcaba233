"""RestartPolicy: what happens after a fault."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.detection import HangPolicy, HealthPolicy, NanPolicy


class RestartPolicy(Config):
    """What happens after a fault, and how often."""

    policy: Literal["wait", "continue"] = "wait"
    """What healthy ranks do when another one, or a node, is lost: `wait` until it has been replaced; or `continue` with
    the next steps, and the replacement joins between two of them. Each rank must hold the whole state, as with DDP."""
    samples: Literal["constant", "fewer"] = "constant"
    """Samples of a step while ranks are missing, with `policy: continue`: all of them, shared by the ranks that are
    left; or only as many micro-batches as those ranks have anyway."""
    max_restarts: NonNegativeInt = 10
    """Faults the job recovers from before it gives up, over its whole life; processes that die at one moment are one
    fault. 0: the first fault ends it."""
    max_restarts_in_window: PositiveInt | None = None
    """Faults within `window_s` that the job recovers from before it gives up, beside `max_restarts`: a limit on their
    rate, which a job of months does not come to by its age. Default: no such limit."""
    window_s: PositiveFloat = 3600.0
    """Seconds over which `max_restarts_in_window` counts; older faults are forgotten."""
    leave_timeout_s: PositiveFloat = 30.0
    """Seconds a worker has, after a fault elsewhere, to leave the step it is making. One that hangs longer
    is ended and replaced as if it had died."""
    lease_s: Annotated[PositiveFloat, Field(ge=1.0)] = 6.0
    """Seconds in which a node that is cut off from the majority of the others has stopped by itself. One that
    was not heard of for half of that counts as lost."""
    node_wait_s: NonNegativeFloat = 30.0
    """Seconds the job waits, when a node is lost and no spare is left, for another one in its place. Pods of
    hyperpod-eks with `kubernetes.launcher: ours` wait 900 unless this is written."""
    form_timeout_s: PositiveFloat = 600.0
    """Seconds in which a rank must be ready, at the start and after a fault; one that is not is replaced."""
    max_in_process: NonNegativeInt = 3
    """Exceptions of one rank in a row that are met in its process; at the next, the process is replaced."""
    max_on_node: NonNegativeInt = 3
    """Deaths of processes of one node in a row that are met there, those of one moment as one; at the next, a spare
    takes its ranks."""
    max_node_losses: NonNegativeInt = 3
    """Nodes the job goes on without before it gives up."""
    quarantine_after: PositiveInt = 2
    """Times that a node is lost before it is not taken again."""
    calm_steps: PositiveInt = 20
    """Faults are in a row while fewer steps than these lie between one and the next."""
    hang: HangPolicy = HangPolicy()
    """When a worker hangs, and what is done then."""
    nan: NanPolicy = NanPolicy()
    """What becomes of steps whose numbers are not finite."""
    health: HealthPolicy = HealthPolicy()
    """What a node is asked before a worker starts on it."""
    compare_replicas_every: NonNegativeInt = 100
    """Ranks that should hold the same state compare checksums of it at the first step and each time this many
    steps have been made. 0: never."""
    preload: tuple[str, ...] = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
    """Modules each node imports once, ahead of need: a replacement worker is forked from there and
    skips its imports, which are most of a restart. They must not touch a GPU. One that starts a thread is left to each
    worker. Of a package that loads its parts when they are used, name those: `trl.GRPOTrainer`."""
    warm_spares: bool = False
    """Whether each node keeps, for each worker with a GPU, a process that has a CUDA context and takes its place when
    it dies. It takes a context's memory on the GPU. A script that sets CUDA_VISIBLE_DEVICES itself comes too late.
    Tried on one GPU, not on several."""
