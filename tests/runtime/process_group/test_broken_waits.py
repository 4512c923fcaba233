"""Errors of collectives that a training function may swallow are seen all the same."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import Member, Ranks

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
            member._inbox.get()  # it is killed here
        handle = dist.all_reduce(torch.ones(1 << 12), async_op=True)
        with contextlib.suppress(RuntimeError):
            handle.wait(timedelta(milliseconds=1))  # it is not done yet, which is no fault
        member.send("first", broken_waits.first())
        member._inbox.get()  # the abort
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
