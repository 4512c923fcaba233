"""A rank that was in no collective when its generation ended can end its step; any other cannot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from world_of_one import world_of_one

from hyperpod_ext.runtime.control_plane.finish_step import SafeToCommit


def looked_from_another_thread(during: Callable[[Callable[[], None]], object]) -> SafeToCommit:
    """What is found by a thread that looks while the main one is in `during`, which calls what it is given there."""
    safe = SafeToCommit()

    def look() -> None:
        thread = threading.Thread(target=safe.look)
        thread.start()
        thread.join()

    during(look)
    return safe


def test_who_trains_by_itself_may_end_the_step():
    with world_of_one():
        dist.all_reduce(torch.ones(3))
        safe = looked_from_another_thread(lambda look: look())
        assert safe.is_so
        dist.all_reduce(torch.ones(3))
        assert not safe.is_so, "that one may have broken"


def test_who_is_in_a_backward_pass_may_not():
    def backward(look: Callable[[], None]) -> None:
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda _: look())
        (x * 2).sum().backward()

    with world_of_one():
        assert not looked_from_another_thread(backward).is_so


def test_who_is_in_a_collective_may_not(monkeypatch):
    def collective(look: Callable[[], None]) -> None:
        monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", lambda _: look())
        dist.barrier()

    with world_of_one():
        assert not looked_from_another_thread(collective).is_so


def _optimizer_steps_on_dtensors() -> Callable[[], None]:
    """A step of each of two optimizers, whose ways are known to torch by then: each chooses its placements once."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for model in models:
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(models[1].parameters(), lr=0.1),
    ]

    def steps() -> None:
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(2):
        steps()
    return steps


@pytest.mark.skipif(torch.__version__ < "2.8", reason="FSDP2 has no CPU stream in this torch")
def test_who_is_anywhere_in_an_optimizers_step_on_dtensors_may_end_it():
    """Parts of torch.distributed that only compute are called there all the time, and wait for nobody."""
    answers: dict[str, bool] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        place = f"{frame.f_code.co_filename.rpartition('/torch/')[2]}:{frame.f_code.co_name}"
        if event == "call" and place.startswith("distributed/") and place not in answers:
            sys.setprofile(None)
            answers[place] = looked_from_another_thread(lambda look: look()).is_so
            sys.setprofile(look)

    with world_of_one():
        steps = _optimizer_steps_on_dtensors()
        sys.setprofile(look)
        try:
            steps()
        finally:
            sys.setprofile(None)
        del steps
    assert any(place.startswith("distributed/device_mesh.py") for place in answers)
    assert [place for place, may in answers.items() if not may] == []


def test_nobody_may_before_anybody_has_looked():
    assert not SafeToCommit().is_so
