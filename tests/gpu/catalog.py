"""The experiments, in the order of their worth: what is unknown and decides most comes first.

`plan.py` runs them; docs/gpu.md has a table of them, which is made from this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from results import Row


@dataclass(frozen=True)
class Experiment(Row):
    """A function `run(lane) -> Figures` of a module in `experiments/`, made in a process of its own."""

    module: str
    limit_s: float
    """After that it is ended, with all that it has started."""
    measures: bool = False
    """Part of `make bench-gpu`."""
    shared: bool = False
    """Its ranks are to be of one node, on lane `multi-rank`."""


PLAN: tuple[Experiment, ...] = (
    Experiment("E1", "ranks that share a GPU add up", "equal sums", "sums", 110.0),
    Experiment(
        "E2",
        "a rank is killed in the midst of all-reduces, with the environment of NCCL that recovery needs and without",
        "survivors live and go on; without it they end",
        "killed_rank",
        170.0,
    ),
    Experiment(
        "E6",
        "the optimizer of a broken step is queued when its peer dies",
        "the committed step is restored, and final weights are those of an undisturbed run, bit for bit",
        "run_ahead",
        120.0,
    ),
    Experiment(
        "E5",
        "groups of DDP and FSDP2 on a 2x2 mesh are aborted all at once, and one by one",
        "at once in less than 5 s",
        "parallel_abort",
        170.0,
    ),
    Experiment(
        "E0",
        "what a process costs on the GPU",
        "figures",
        "context",
        150.0,
        measures=True,
    ),
    Experiment(
        "E8",
        "copies off the GPU and back, and the stall when every step is saved",
        "0.9 and 0.8 of a pinned copy; 2 % at most",
        "copies",
        150.0,
        measures=True,
    ),
    Experiment(
        "E11",
        "a rank dies while a communicator is made",
        "abort ends within 30 s, and the main thread raises",
        "init_abort",
        100.0,
    ),
    Experiment(
        "E9",
        "an all-reduce in a CUDA graph is aborted",
        "it ends when the graph was reset before, and hangs else",
        "captured_graph",
        110.0,
    ),
    Experiment(
        "E7",
        "the fork server and modules that use CUDA on import",
        "one that initializes it is refused; a child of the others can use the GPU",
        "forked",
        90.0,
    ),
    Experiment(
        "P",
        "jobs of the product with DDP and FSDP2 through an exception and a `kill -9`",
        "no step lost, survivors keep their processes",
        "product",
        280.0,
    ),
    Experiment(
        "R",
        "seconds from a fault to the first new step, beside torchrun with DCP",
        "0.5 s after an exception, 1.5 to 5 s after a kill, a fifth of torchrun's",
        "recoveries",
        200.0,
        measures=True,
    ),
    Experiment(
        "E10",
        "GPU memory outlives the process that wrote it",
        "equal bytes",
        "memory_handles",
        90.0,
    ),
    Experiment(
        "E3",
        "a group of `nccl2` is reconfigured after a kill",
        "right sums in the same group object",
        "reconfigured",
        100.0,
        shared=True,
    ),
    Experiment(
        "E4",
        "a stopped rank of the same node while the others abort",
        "they wait until it is killed",
        "stopped_rank",
        100.0,
        shared=True,
    ),
)
