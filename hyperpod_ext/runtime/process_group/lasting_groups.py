"""Group objects that outlive a fault, by torch's reconfiguration of groups (from 2.14 on).

A DDP module, an FSDP2 module, a device mesh or a variable of the script keeps its group object. Between two generations
each group has only this rank, so that its connections are closed. In the next generation it gets its ranks back at the
point where it would have been made: the default group at once, others when the script or `run.keep` requests one of the
same name and ranks. A new process makes its groups in the same order, and joins them there.

Torch cannot reconfigure a group of several backends, but each of its backends: first gloo's, then NCCL's. NCCL's second
implementation can do it, torch's default from 2.15 on. Its watchdog aborts after an error by itself, maybe before we
do, and calls a hook first.
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
"""Any: older torch has no types of reconfigure."""
_MOST_RANKS = 128
"""A reconfigured group connects every rank to every other. Larger jobs make new groups, which connect at the first
use."""

_RANK_BITS = 20
_HOOK = 0x68707874
"""Unique number of our hook: `hpxt`."""
_WAKE_S = 5.0
"""Time limit of a reconfiguration. On a GPU it took 0.7 s, and never ended if a rank of the group had died."""


def can_last(world_size: int, *, nccl: bool = False) -> bool:
    """Return whether groups of a job of this size are reconfigured; equal on all ranks.

    Args:
        nccl: whether NCCL is one of the backends.
    """
    # in torch 2.15.0 a second reconfiguration never makes lazy connections: gloo has ended the connecting thread
    if world_size > _MOST_RANKS or os.environ.get(LAZY, "0") != "0" or missing(Feature.LASTING_GROUPS):
        return False
    # NCCL's watchdog aborts such groups by itself: without its hook, an aborted step would count as made
    hears = hasattr(Backend, "register_abort_hook")
    return not nccl or (hears and engine_of(torch.__version__, os.environ) == "nccl2")


class LastingGroups:
    """The groups of one process, for one rank number and world size.

    Args:
        backends: backend argument of `init_process_group`.
        before_abort: called before a backend aborts by itself, from its own thread.
    """

    def __init__(
        self, rank: int, world_size: int, backends: str = "gloo", before_abort: Callable[[], object] = lambda: None
    ) -> None:
        self.place, self._backends, self._before_abort = (rank, world_size), backends, before_abort
        self._store = LastingStore()
        self._generation = 0
        self._asleep: set[str] = set()
        """Names of groups with only this rank in them."""
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
        """Replace torch's `_new_process_group_helper`: return the kept group, or a new one, and its store."""
        if not ranks:  # the default group, which gets its ranks in `open`
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
        """Leave a generation: close all connections, and keep the groups' objects."""
        self._store.become(HashStore())
        for name, group in torch_names.open_groups().items():
            if _can_be_reconfigured(group):
                # not NCCL: its abort was enough, and a communicator of one rank would be useless
                if (part := torch_names.parts_of(group).get("cpu")) is not None:
                    _reconfigure(part, self._uuid(alone=True), [part.get_reconfigure_handle()])
                self._asleep.add(name)
            else:
                self._forget(group)

    def asleep(self) -> frozenset[str]:
        """Return the names of groups with only this rank: not requested in this generation yet."""
        return frozenset(self._asleep)

    def _wake(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Reconfigure a group to its ranks. Collective."""
        self._awake = threading.Event()
        try:
            if self._given_up:
                self.give_up()
            self._give_ranks(group, ranks)
        finally:
            self._awake.set()

    def give_up(self) -> None:
        """End this process later if it hangs in NCCL's set-up with a dead rank, which nothing else can end.

        Called when the generation is over, from any thread.
        """
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
        """Register the hook in each backend of a new group."""
        for part in torch_names.parts_of(group).values():
            _hear(part, functools.partial(self._about_to_abort, str(group.group_name)))

    def _about_to_abort(self, name: str) -> None:
        if name not in self._asleep:  # otherwise of an ended generation
            self._before_abort()

    def _uuid(self, *, alone: bool = False) -> int:
        """Return the ID of a configuration. Handles contain it and must differ, so each rank alone has its own."""
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
    """Register a hook that a backend calls before it aborts by itself, if it ever does."""
    if hasattr(part, "supports_abort_hooks"):
        if part.supports_abort_hooks:
            part.register_abort_hook(_HOOK, hook)
    elif hasattr(part, "register_abort_hook"):  # torch 2.14
        with contextlib.suppress(RuntimeError):  # it never aborts by itself
            part.register_abort_hook(_HOOK, hook)


def _end_unless(awake: threading.Event) -> None:
    if not awake.wait(_WAKE_S):
        sys.stderr.write(f"was in the set-up of a process group {_WAKE_S:g} s after a fault elsewhere\n")
        sys.stderr.flush()
        os._exit(1)  # a replacement process restores the state


def _reconfigure(part: Any, uuid: int, handles: list[str]) -> None:
    options = torch_names.ReconfigureOptions()
    options.uuid, options.handles = uuid, handles
    part.reconfigure(options).wait()
