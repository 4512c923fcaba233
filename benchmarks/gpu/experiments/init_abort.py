"""E11: a rank is killed before it has joined a communicator that another one is making. With a communicator that is
made without blocking, the abort ends after TORCH_NCCL_NONBLOCKING_TIMEOUT, and the main thread is free. Torch's second
implementation makes it blocking: there the main thread may stay, and the product's agent ends its process."""

from __future__ import annotations

import time

from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures
from sums import add_up

_MADE_WITHOUT_BLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
_TIMEOUT_S = 30.0
"""TORCH_NCCL_NONBLOCKING_TIMEOUT of the environment that recovery needs."""
_SLACK_S = 10.0
_GLOO_TIMEOUT_S = 5.0
_INTO_IT_S = 3.0
"""NCCL does not say that it waits for a rank; by then it does."""


def run(lane: Lane) -> Figures:
    with RankProcesses(lane, "init_abort:body", 2, more=_MADE_WITHOUT_BLOCKING) as ranks:
        ranks.until("initializing", 40.0 * lane.patience, [0])
        ranks.until("waiting", 40.0 * lane.patience, [1])
        time.sleep(_INTO_IT_S)
        ranks.kill(1)
        told = ranks.tell("abort", [0])
        limit_s = (_TIMEOUT_S + _SLACK_S) * lane.patience
        figures = {"abort": Figure(ranks.until("aborted", limit_s, [0])[0]["seconds"], "s")}
        name = "abort to the main thread being free"
        try:
            free = ranks.until("free", _SLACK_S if lane.engine == "nccl2" else limit_s, [0])[0]
        except TimeoutError as error:
            if lane.engine != "nccl2":
                raise
            return figures | {name: Figure(f"not yet: {error}")}
    return figures | {name: Figure(free["t"] - told, "s"), "it raised": Figure(free["error"])}


def body(rank: Rank) -> None:
    if rank.rank == 1:
        rank.report("waiting")
        return rank.wait_for("end")
    rank.report("initializing")
    error = "nothing"
    try:
        rank.open(timeout_s=_GLOO_TIMEOUT_S if rank.lane.fake else 100.0)
        add_up(rank, 1 << 10)
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0][:200]}"
    rank.report("free", error=error)
    rank.aborted.wait(_TIMEOUT_S + _SLACK_S)  # both end when the time is over: it is reported by its own thread
    return None
