"""Groups whose objects outlive a fault, where torch can reconfigure them: from 2.14 on.

A DDP module, an FSDP2 module, a device mesh or a variable of the script goes on with the object that it holds. Between
two generations each group has this rank alone in it, so that its connections are closed. In the next generation it
gets its ranks back when it would have been made: the default group at once, any other when the script, or `run.keep`
for it, asks for one of the same name and ranks. A new process makes its own in the same order, and meets them there.

Torch reconfigures no group of several backends, but each of its backends: gloo's and NCCL's are, one after the other.
NCCL can do that in its second implementation, torch's default from 2.15 on. That one's watchdog aborts by itself what
has met an error, maybe before we do. It says so before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore

from hyperpod_ext.runtime.process_group import torch_private as torch_names
from hyperpod_ext.runtime.process_group.gloo_backend import LAZY
from hyperpod_ext.runtime.process_group.nccl.environment import engine_of
from hyperpod_ext.runtime.process_group.store import LastingStore, PartitionedStore
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing

_dist: Any = dist
"""Older torch has no reconfigure, and so no types of it."""
_MOST_RANKS = 128
"""Each rank connects to every other when a group is reconfigured; more than these connect when they first speak, in
groups that are made anew."""

_RANK_BITS = 20
_HOOK = 0x68707874
"""A number that no other hook of a backend has: `hpxt`."""
_WAKE_S = 5.0
"""On a GPU all groups of a rank had their ranks after 0.7 s, and a rank never came out when one of those had died."""


def can_last(world_size: int, *, nccl: bool = False) -> bool:
    """Whether groups of a job of so many ranks are reconfigured; all of its ranks find the same.

    Args:
        nccl: whether NCCL is one of their backends.
    """
    # in torch 2.15.0 lazy connections of a group that is reconfigured a second time are never made: gloo has ended the
    # thread that would
    if world_size > _MOST_RANKS or os.environ.get(LAZY, "0") != "0" or missing(Feature.LASTING_GROUPS):
        return False
    # NCCL's watchdog aborts such groups by itself: a step that it cuts would be taken for made, did nobody hear of it
    hears = hasattr(Backend, "register_abort_hook")
    return not nccl or (hears and engine_of(torch.__version__, os.environ) == "nccl2")


class LastingGroups:
    """The groups of one process, while its rank and the number of ranks stay the same.

    Args:
        backends: as `init_process_group` takes them.
        before_abort: called before a backend aborts by itself, from its own thread.
    """

    def __init__(
        self, rank: int, world_size: int, backends: str = "gloo", before_abort: Callable[[], object] = lambda: None
    ) -> None:
        self.place, self._backends, self._before_abort = (rank, world_size), backends, before_abort
        self._store = LastingStore()
        self._generation = 0
        self._asleep: set[str] = set()
        """Names of groups that have this rank alone in them."""
        self._awake, self._given_up = threading.Event(), False
        self._awake.set()

    def open(self, store: PartitionedStore) -> None:
        """Open the default group in a generation. Every rank must have left the former one."""
        self._store.become(store)
        self._generation, self._given_up = store.generation, False
        rank, world_size = self.place
        if not dist.is_initialized():
            torch_names.forget_groups()
            _dist.init_process_group(
                self._backends, store=self._store, rank=rank, world_size=world_size, enable_reconfigure=True
            )
            self._listen(_default())
        torch_names.forget_groups(kept=1)
        self._wake(_default(), range(world_size))

    def make(self, name: str, ranks: Sequence[int], make: Callable[..., Any]) -> Any:
        """As torch's `_new_process_group_helper`: the group that there was, or a new one, and its store."""
        if not ranks:  # the default group; `open` gives it its ranks
            return make()
        known = torch_names.open_groups().get(name) if name in self._asleep else None
        if known is not None and dist.get_process_group_ranks(known) == list(ranks):
            self._wake(known, ranks)
            return known, torch_names.store_of(known)
        if known is not None:
            self._forget(known)
        group, store = make(enable_reconfigure=True)
        if isinstance(group, dist.ProcessGroup) and _can_be_reconfigured(group):
            self._listen(group)
            self._wake(group, ranks)
        return group, store

    def leave(self) -> None:
        """A generation is over: close all connections, and keep the groups' objects."""
        self._store.become(HashStore())
        for name, group in torch_names.open_groups().items():
            if _can_be_reconfigured(group):
                # of NCCL's, the abort was enough: a communicator of one rank would be made on the GPU for nothing
                if (part := torch_names.parts_of(group).get("cpu")) is not None:
                    _reconfigure(part, self._uuid(alone=True), [part.get_reconfigure_handle()])
                self._asleep.add(name)
            else:
                self._forget(group)

    def asleep(self) -> frozenset[str]:
        """Names of groups that no rank but this one is in: they were not asked for in this generation."""
        return frozenset(self._asleep)

    def _wake(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Give a group its ranks; each of them does."""
        self._awake = threading.Event()
        try:
            if self._given_up:
                self.give_up()
            self._give_ranks(group, ranks)
        finally:
            self._awake.set()

    def give_up(self) -> None:
        """The generation is over. A rank that is in NCCL's set-up waits there for good for one that has died, and
        nothing ends that but the end of its process. From any thread."""
        self._given_up = True
        if "nccl" in self._backends and not self._awake.is_set():
            threading.Thread(target=_end_unless, args=(self._awake,), name="hpx-wake", daemon=True).start()

    def _give_ranks(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        name = str(group.group_name)
        for device, part in torch_names.parts_of(group).items():
            self._store.set(f"handle/{name}/{device}/{self.place[0]}", part.get_reconfigure_handle())
            handles = [self._store.get(f"handle/{name}/{device}/{rank}").decode() for rank in ranks]
            _reconfigure(part, self._uuid(), handles)
        self._asleep.discard(name)

    def _listen(self, group: dist.ProcessGroup) -> None:
        """Of a group that was just made."""
        for part in torch_names.parts_of(group).values():
            _hear(part, functools.partial(self._about_to_abort, str(group.group_name)))

    def _about_to_abort(self, name: str) -> None:
        if name not in self._asleep:  # else of a generation that was left
            self._before_abort()

    def _uuid(self, *, alone: bool = False) -> int:
        """Of what a group becomes. Handles name it, and must differ: so that of a rank alone is its own."""
        return (self._generation << _RANK_BITS) + (1 + self.place[0] if alone else 0)

    def _forget(self, group: dist.ProcessGroup) -> None:
        self._asleep.discard(str(group.group_name))
        dist.destroy_process_group(group)


def _default() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "it has been opened"
    return group


def _can_be_reconfigured(group: dist.ProcessGroup) -> bool:
    return all(part.supports_reconfigure for part in torch_names.parts_of(group).values())


def _hear(part: Any, hook: Callable[[], None]) -> None:
    """Have a backend say it before it aborts by itself, if it ever does."""
    if hasattr(part, "supports_abort_hooks"):
        if part.supports_abort_hooks:
            part.register_abort_hook(_HOOK, hook)
    elif hasattr(part, "register_abort_hook"):  # torch 2.14
        with contextlib.suppress(RuntimeError):  # it never does
            part.register_abort_hook(_HOOK, hook)


def _end_unless(awake: threading.Event) -> None:
    if not awake.wait(_WAKE_S):
        sys.stderr.write(f"was in the set-up of a process group {_WAKE_S:g} s after a fault elsewhere\n")
        sys.stderr.flush()
        os._exit(1)  # a process in its place restores what this one has


def _reconfigure(part: Any, uuid: int, handles: list[str]) -> None:
    options = torch_names.ReconfigureOptions()
    options.uuid, options.handles = uuid, handles
    part.reconfigure(options).wait()
