"""A rank that was in no collective when its generation ended can end its step; any other cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
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


def test_nobody_may_before_anybody_has_looked():
    assert not SafeToCommit().is_so
