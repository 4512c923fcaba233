"""Errors of collectives that a training function may swallow are seen all the same."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Member, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.process_group import broken_waits


def _swallow(member: Member) -> None:
    """Rank 1 is killed before it takes part in a sum that rank 0 has begun. Where the two have a connection already,
    that ends; else rank 0 still looks for where the other is."""
    while member.join():
        broken_waits.forget()
        if member.generation == 1:
            dist.all_reduce(torch.ones(1))
        if member.rank == 1:
            member.send("waits")
            member.inbox.get()  # it is killed here
        handle = dist.all_reduce(torch.ones(1 << 12), async_op=True)
        with contextlib.suppress(RuntimeError):
            handle.wait(timedelta(milliseconds=1))  # it is not done yet, which is no fault
        member.send("first", broken_waits.first())
        member.inbox.get()  # the abort
        with contextlib.suppress(RuntimeError, ConnectionError):
            handle.wait()
        member.send("then", broken_waits.first())
        del handle
        member.groups.abort()
        member.groups.leave()


def test_a_wait_that_a_fault_ends_is_seen_and_one_that_only_takes_long_is_not() -> None:
    with Ranks(2, _swallow) as ranks:
        for _ in range(2):
            ranks.begin()
            assert ranks.hear("first", 1) == {0: ("",)}
            ranks.hear("waits", 0)
            ranks.kill(1)
            ranks.abort(1)
            ((then,),) = ranks.hear("then", 1).values()
            assert then
            ranks.start(1)


def _swallow_in_forward(member: Member) -> None:
    """DDP brings what layers keep, as means are, to all ranks there."""
    _swallow_in_ddp(member, nn.BatchNorm1d(4), backward=False)


def _swallow_in_backward(member: Member) -> None:
    _swallow_in_ddp(member, nn.Linear(4, 4), backward=True)


def _swallow_in_ddp(member: Member, module: nn.Module, *, backward: bool) -> None:
    """Rank 1 is killed between two steps of DDP."""
    while member.join():
        broken_waits.forget()
        parallel = DistributedDataParallel(module)
        for _ in range(3):  # gradient buckets have their layout then
            parallel(torch.ones(2, 4)).sum().backward()
        member.send("waits", broken_waits.first())
        if member.rank == 1:
            member.inbox.get()  # it is killed here
        with contextlib.suppress(RuntimeError):
            while True:  # what is on its way may arrive
                made = parallel(torch.ones(2, 4)).sum()
                if backward:
                    made.backward()
        member.send("then", broken_waits.first())
        member.inbox.get()  # the abort
        del parallel
        member.groups.abort()
        member.groups.leave()


@pytest.mark.parametrize("swallow", [_swallow_in_forward, _swallow_in_backward])
def test_what_ddp_waits_for_is_seen_too(swallow: Any) -> None:
    """A script that skips a batch which raises went on with no sum at all, and its steps counted."""
    with Ranks(2, swallow) as ranks:
        ranks.begin()
        assert ranks.hear("waits") == {0: ("",), 1: ("",)}
        ranks.kill(1)
        ((then,),) = ranks.hear("then", 1).values()
        assert then
        ranks.abort(1)
