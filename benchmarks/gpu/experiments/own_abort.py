"""E12: a rank dies, and nobody tells the others. The watchdog of torch's second implementation aborts a group that can
be reconfigured by itself, and what is queued behind the broken collective runs on garbage. Markers that are asked in
its hook, before that, count the steps that are whole."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from reconfigured import open_group
from results import Figure, Figures, NotRunError

from hyperpod_ext.runtime.process_group.lasting_groups import _hear
from hyperpod_ext.runtime.state.device_steps import CudaDevice, CudaMarker, DeviceSteps

_SURVIVORS = [0, 1]
_WHOLE = 6
"""Steps that all three ranks make; the survivors queue one more."""
_LIMIT_S = 60.0


def run(lane: Lane) -> Figures:
    if lane.fake or lane.engine != "nccl2":
        raise NotRunError("only torch's second implementation of NCCL, the default from 2.15 on, aborts by itself")
    with RankProcesses(lane, "own_abort:body", 3) as ranks:
        ranks.until("queued", _LIMIT_S)
        killed = ranks.kill(2)
        heard = ranks.until("heard", _LIMIT_S, _SURVIVORS)
        late = ranks.until("late", _LIMIT_S, _SURVIVORS)
    counted = {one["steps"] for one in heard.values()}
    assert counted == {_WHOLE}, f"steps {sorted(counted)} were counted, and {_WHOLE} are whole"
    return {
        "kill to the hook": Figure(max(one["t"] for one in heard.values()) - killed, "s"),
        "steps counted in the hook": Figure(_WHOLE),
        "one more would be counted later": Figure(all(one["reached"] for one in late.values())),
    }


def body(rank: Rank) -> None:
    open_group(rank, 0)
    steps, tensor = DeviceSteps(), torch.ones(1 << 14, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    steps.enter()
    steps.follow(CudaDevice(), 0)
    survives = rank.rank in _SURVIVORS
    heard = threading.Event()
    counted: list[int] = []

    def about_to_abort() -> None:
        steps.freeze()
        counted.append(steps.finished())
        heard.set()

    _hear(dist.group.WORLD._get_backend(rank.device), about_to_abort)  # type: ignore[union-attr]
    for step in range(1, _WHOLE + 1 + survives):
        dist.all_reduce(tensor)
        tensor.div_(rank.world_size)
        steps.queue(step)
    behind = CudaMarker()
    while steps.finished() < _WHOLE:
        time.sleep(0.001)
    rank.report("queued")
    if not survives:
        return rank.wait_for("end")
    if not heard.wait(_LIMIT_S):
        raise TimeoutError(f"nothing was heard within {_LIMIT_S:g} s")
    rank.report("heard", steps=counted[0])
    deadline = time.monotonic() + 10.0
    while not behind.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    rank.report("late", reached=behind.query())
    return None
