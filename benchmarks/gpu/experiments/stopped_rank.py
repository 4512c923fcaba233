"""E4: a rank of the same node is stopped (SIGSTOP), and the others abort. NCCL's abort waits for every rank of the
node: it returns once the stopped one is killed."""

from __future__ import annotations

import signal

from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures, NotRunError
from sums import add_up

_SURVIVORS = [0, 1]
_ALONE_S = 8.0


def run(lane: Lane) -> Figures:
    if lane.name == "hostid":
        nccl = ".".join(map(str, lane.nccl))
        raise NotRunError(f"NCCL {nccl} has no NCCL_MULTI_RANK_GPU_ENABLE: 2.30 and torch 2.14 or newer have")
    with RankProcesses(lane, "stopped_rank:body", 3) as ranks:
        ranks.until("running", 40.0 * lane.patience)
        ranks.signal(2, signal.SIGSTOP)
        ranks.tell("abort", _SURVIVORS)
        waits = _waits(ranks, _ALONE_S)
        killed = ranks.kill(2)
        ranks.until("aborted", 40.0 * lane.patience, _SURVIVORS)
        free = ranks.until("free", 40.0 * lane.patience, _SURVIVORS)
    return {
        f"abort waits for the stopped rank, for {_ALONE_S:g} s at least": Figure(waits),
        "kill of it to the others' main threads being free": Figure(
            max(0.0, max(one["t"] for one in free.values()) - killed), "s"
        ),
    }


def _waits(ranks: RankProcesses, limit_s: float) -> bool:
    try:
        ranks.until("aborted", limit_s, _SURVIVORS)
    except TimeoutError:
        return True
    return False


def body(rank: Rank) -> None:
    rank.open()
    rank.repeat(lambda: add_up(rank, 1 << 14))
