"""E2: a rank is killed in the midst of all-reduces. Survivors with the environment that recovery needs live, abort
and go on with a new process; without it torch ends them."""

from __future__ import annotations

import time

from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import FailedError, Figure, Figures
from sums import add_up

_ELEMENTS = {"cuda": 4 << 20, "cpu": 1 << 14}
_WATCHED_S = {"cuda": 15.0, "cpu": 1.0}
"""Survivors are left alone for so long: torch's watchdog has noticed by then."""
_SHORT_SLEEP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
"""torch's watchdog sleeps four times as long before it ends a process: 60 s by default, to no use here."""


def run(lane: Lane) -> Figures:
    figures = _with_environment(lane)
    try:
        return figures | _without_environment(lane)
    except TimeoutError as error:
        raise FailedError(f"without the environment, {error}", figures) from None


def _with_environment(lane: Lane) -> Figures:
    with RankProcesses(lane, "killed_rank:body", 3, generation=0) as ranks:
        ranks.until("running", 40.0 * lane.patience)
        ranks.kill(2)
        time.sleep(_WATCHED_S[lane.device])
        assert ranks.living() == [0, 1], f"without being told to, ranks {sorted({0, 1} - set(ranks.living()))} ended"
        told = ranks.tell("abort")
        ranks.start(2, generation=1)
        aborted = ranks.until("aborted", 40.0 * lane.patience, [0, 1])
        free = ranks.until("free", 40.0 * lane.patience, [0, 1])
        summed = ranks.until("summed", 60.0 * lane.patience)
        ranks.end()
    assert all(one["right"] for one in summed.values()), "sums of the new group are wrong"
    return {
        "abort": Figure(max(one["seconds"] for one in aborted.values()), "s"),
        "abort to the main thread being free": Figure(max(one["t"] for one in free.values()) - told, "s"),
        "abort to the first sum with a new process": Figure(max(one["t"] for one in summed.values()) - told, "s"),
    }


def _without_environment(lane: Lane) -> Figures:
    name = "without the environment, survivors end after"
    if lane.fake:
        return {name: Figure("left out: gloo ends no process")}
    with RankProcesses(lane, "killed_rank:body", 3, recovery=False, more=_SHORT_SLEEP, generation=0) as ranks:
        ranks.until("running", 40.0)
        killed = ranks.kill(2)
        ended = ranks.until_ended([0, 1], 60.0)
        codes = sorted({str(ranks.exit_code(rank)) for rank in (0, 1)})
    return {name: Figure(ended - killed, "s"), "and their exit codes are": Figure(", ".join(codes))}


def body(rank: Rank) -> None:
    if rank.options["generation"] == 0:
        rank.open()
        rank.repeat(lambda: add_up(rank, _ELEMENTS[rank.lane.device]))
        rank.synchronize()
        rank.close()
    rank.open(1)
    rank.report("summed", right=all(add_up(rank, _ELEMENTS[rank.lane.device]) for _ in range(3)))
    rank.close()
