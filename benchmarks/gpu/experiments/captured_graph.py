"""E9: an all-reduce captured in a CUDA graph loses its peer. NCCL's abort waits for graphs that hold the
communicator: with the graph reset before it ends, without that it hangs. On CPU a function that makes the all-
reduce stands for the graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures

_LIMIT_S = 20.0


def run(lane: Lane) -> Figures:
    with_reset = _abort(lane, reset=True)
    try:
        without = _abort(lane, reset=False)
    except TimeoutError:
        without = Figure(f"did not return within {_LIMIT_S:g} s")
    return {"graph reset before: abort": with_reset, "graph kept: abort": without}


def _abort(lane: Lane, *, reset: bool) -> Figure:
    with RankProcesses(lane, "captured_graph:body", 2, reset=reset) as ranks:
        ranks.until("running", 40.0 * lane.patience)
        ranks.kill(1)
        ranks.tell("abort", [0])
        aborted = ranks.until("aborted", _LIMIT_S * lane.patience, [0])[0]
        ranks.until("free", _LIMIT_S * lane.patience, [0])
        return Figure(aborted["seconds"], "s")


def body(rank: Rank) -> None:
    rank.open()
    tensor = torch.ones(1 << 16, device=rank.device)
    graph: Any = _Function(tensor) if rank.lane.fake else _captured(tensor)
    if rank.options["reset"]:
        rank.before_abort = graph.reset
    rank.repeat(graph.replay)


def _captured(tensor: torch.Tensor) -> torch.cuda.CUDAGraph:
    dist.all_reduce(tensor)  # makes the communicator, which cannot be done while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: the thread of torch's watchdog may ask for events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
    return graph


class _Function:
    """In place of a graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def replay(self) -> None:
        dist.all_reduce(self._tensor)

    def reset(self) -> None:
        """It holds nothing."""
