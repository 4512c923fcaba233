"""The experiments, in the order of their worth: what is unknown and decides most comes first.

`plan.py` runs them; docs/gpu.md has a table of them, which is made from this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from results import Row


@dataclass(frozen=True)
class Experiment(Row):
    """A function `run(lane) -> Figures` of a module in `experiments/`, called in a process of its own."""

    module: str
    """Or `module:function`."""
    limit_s: float
    """After that it is ended, with all that it has started."""
    measures: bool = False
    """Part of `make bench-gpu`."""
    shared: bool = False
    """Its ranks are to be of one node, on lane `multi-rank`."""


PLAN: tuple[Experiment, ...] = (
    Experiment(
        "E1",
        "ranks that share a GPU make an all-reduce",
        "equal sums",
        "sums",
        110.0,
    ),
    Experiment(
        "E2",
        "a rank is killed in the midst of all-reduces",
        "survivors live and go on; without the environment of NCCL that recovery needs they end",
        "killed_rank",
        170.0,
    ),
    Experiment(
        "E6",
        "a rank dies while the optimizer of its step is queued on the others",
        "final weights are those of an undisturbed run, bit for bit",
        "run_ahead",
        120.0,
    ),
    Experiment(
        "E12",
        "a rank dies, and torch's watchdog aborts before any process is asked to",
        "in its hook the steps that are whole are counted, and none behind them",
        "own_abort",
        100.0,
    ),
    Experiment(
        "E5",
        "groups of DDP and FSDP2 are aborted, all at once and one by one",
        "at once in less than 5 s",
        "parallel_abort",
        170.0,
    ),
    Experiment(
        "E0",
        "seconds and memory of a CUDA context; when memory of a killed process is free",
        "figures",
        "context",
        150.0,
        measures=True,
    ),
    Experiment(
        "E8",
        "copies off the GPU and back; steps that are saved each",
        "copies off at 0.9 of a pinned copy; steps at most 2 % longer",
        "copies",
        150.0,
        measures=True,
    ),
    Experiment(
        "E11",
        "a rank dies while a communicator is made",
        "the abort ends within 30 s; the main thread raises, or its process must be ended",
        "init_abort",
        100.0,
    ),
    Experiment(
        "E9",
        "an all-reduce in a CUDA graph is aborted",
        "the abort ends if the graph was reset before, and hangs if not",
        "captured_graph",
        110.0,
    ),
    Experiment(
        "E7",
        "the fork server preloads modules that use CUDA",
        "one that initializes it is refused; after others a forked child can use the GPU",
        "forked",
        90.0,
    ),
    Experiment(
        "P1",
        "jobs with DDP through an exception and a `kill -9`",
        "no step is lost, and survivors keep their processes",
        "product:ddp",
        170.0,
    ),
    Experiment(
        "P2",
        "jobs with FSDP2 through the same",
        "the same",
        "product:fsdp2",
        170.0,
    ),
    Experiment(
        "P3",
        "a compiled model under autocast and a gradient scaler through the same",
        "the same",
        "product:compiled",
        230.0,
    ),
    Experiment(
        "P4",
        "a rank runs out of memory, and later reads beyond a tensor",
        "the first leaves its process, the second replaces it; no step is lost",
        "product:cuda_errors",
        120.0,
    ),
    Experiment(
        "P5",
        "jobs of Lightning, Transformers and Accelerate through a `kill -9`",
        "no step is lost, and survivors keep their processes",
        "product:trainers",
        200.0,
    ),
    Experiment(
        "P6",
        "pods of HyperPod EKS with our agent, through an exception, a `kill -9`, an unusable GPU context, a lost pod",
        "the job goes on, in its processes where they are left",
        "on_pods:ours",
        230.0,
    ),
    Experiment(
        "P7",
        "the same with `hyperpodrun`, through an exception and a `kill -9`",
        "the job goes on",
        "on_pods:hyperpodrun",
        200.0,
    ),
    Experiment(
        "R",
        "seconds from a fault to the first new step, compared with torchrun with DCP",
        "0.5 s after an exception, 5 s after a kill, 1.5 s with a warm spare; a fifth of torchrun's",
        "recoveries",
        260.0,
        measures=True,
    ),
    Experiment(
        "E10",
        "memory of the GPU outlives the process that wrote it",
        "equal bytes",
        "memory_handles",
        90.0,
    ),
    Experiment(
        "E3",
        "a group of `nccl2` is reconfigured after a kill",
        "right sums, in the same group object",
        "reconfigured",
        100.0,
        shared=True,
    ),
    Experiment(
        "E4",
        "ranks abort while another one of their node is stopped",
        "their aborts end, at the latest when it is killed",
        "stopped_rank",
        100.0,
        shared=True,
    ),
)
