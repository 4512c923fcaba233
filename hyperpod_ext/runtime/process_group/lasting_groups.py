"""Keeps process group objects after a fault, with torch's reconfiguration of process groups (from torch 2.14 on).

A DDP module, an FSDP2 module, a device mesh or a variable of the script keeps its group object. Between two
generations, each group contains only this rank, and all its connections are closed. In the next generation, the default
group gets its ranks back immediately. Any other group gets its ranks back when the script or `run.keep` requests a
group with the same name and ranks. A new process makes its groups in the same order, and so joins each group with the
other ranks.

torch cannot reconfigure a group that has several backends, but it can reconfigure each backend: first gloo, then NCCL.
For NCCL, reconfiguration needs torch's second implementation (`nccl2`), the default from 2.15 on. NCCL's watchdog may
abort a group after an error, perhaps before this module does. The watchdog calls a hook before it aborts.
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
"""torch.distributed with type Any, because older versions of torch have no types for reconfiguration."""
_MOST_RANKS = 128
"""Maximum number of ranks of a job that reconfigures groups, because reconfiguration connects each rank to every other
rank. Larger jobs make new groups, whose connections are made at their first use."""

_RANK_BITS = 20
_HOOK = 0x68707874
"""Number that identifies our abort hook in a backend: the bytes of `hpxt`."""
_WAKE_S = 5.0
"""Time limit of a reconfiguration, in seconds. On a GPU, a reconfiguration took 0.7 s, and never ended if a rank of the
group had died."""


def can_last(world_size: int, *, nccl: bool = False) -> bool:
    """Return whether a job of `world_size` ranks reconfigures its groups. The result is the same on all ranks.

    Args:
        nccl: whether NCCL is one of the backends.
    """
    # no reconfiguration with lazy connections: in torch 2.15.0, gloo ends the thread that connects, so a second
    # reconfiguration never makes connections
    if world_size > _MOST_RANKS or os.environ.get(LAZY, "0") != "0" or missing(Feature.LASTING_GROUPS):
        return False
    # without the hook, a step could count as committed although NCCL's watchdog has aborted the groups
    hears = hasattr(Backend, "register_abort_hook")
    return not nccl or (hears and engine_of(torch.__version__, os.environ) == "nccl2")


class LastingGroups:
    """The kept groups of one process, valid as long as its rank and the world size stay the same.

    Args:
        backends: the argument `backend` of `init_process_group`.
        before_abort: function that is called before a backend aborts by itself, in the backend's thread.
    """

    def __init__(
        self, rank: int, world_size: int, backends: str = "gloo", before_abort: Callable[[], object] = lambda: None
    ) -> None:
        self.place, self._backends, self._before_abort = (rank, world_size), backends, before_abort
        self._store = LastingStore()
        self._generation = 0
        self._asleep: set[str] = set()
        """Names of kept groups that contain only this rank at the moment."""
        self._awake, self._given_up = threading.Event(), False
        self._awake.set()

    def open(self, store: PartitionedStore) -> None:
        """Open the default group for a generation, after every rank has left the previous generation."""
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
        """Replaces torch's `_new_process_group_helper`. Returns a kept or new group, with its store."""
        if not ranks:  # the default group gets its ranks back in `open`
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
        """Leave a generation: close all connections of the groups, and keep the group objects."""
        self._store.become(HashStore())
        for name, group in torch_names.open_groups().items():
            if _can_be_reconfigured(group):
                # reconfigure only gloo, because NCCL is aborted already, and a communicator of one rank would be
                # useless
                if (part := torch_names.parts_of(group).get("cpu")) is not None:
                    _reconfigure(part, self._uuid(alone=True), [part.get_reconfigure_handle()])
                self._asleep.add(name)
            else:
                self._forget(group)

    def asleep(self) -> frozenset[str]:
        """Return the names of groups that contain only this rank, because the script has not requested these groups in
        this generation yet."""
        return frozenset(self._asleep)

    def _wake(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Give a group its ranks back by reconfiguration. All ranks of the group must call this method."""
        self._awake = threading.Event()
        try:
            if self._given_up:
                self.give_up()
            self._give_ranks(group, ranks)
        finally:
            self._awake.set()

    def give_up(self) -> None:
        """End this process after a while if it hangs in NCCL's set-up with a dead rank, because nothing else can end
        the hang.

        Called by any thread when the generation is over.
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
        """Register our abort hook in each backend of a group."""
        for part in torch_names.parts_of(group).values():
            _hear(part, functools.partial(self._about_to_abort, str(group.group_name)))

    def _about_to_abort(self, name: str) -> None:
        if name not in self._asleep:  # groups in `_asleep` belong to an ended generation
            self._before_abort()

    def _uuid(self, *, alone: bool = False) -> int:
        """Return the number of a configuration. The number is part of each handle, and handles must differ, so each
        rank that is alone in its group uses its own number."""
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
    """Register a hook that a backend calls before it aborts by itself. Some backends never abort by themselves."""
    if hasattr(part, "supports_abort_hooks"):
        if part.supports_abort_hooks:
            part.register_abort_hook(_HOOK, hook)
    elif hasattr(part, "register_abort_hook"):  # torch 2.14
        with contextlib.suppress(RuntimeError):  # this backend never aborts by itself
            part.register_abort_hook(_HOOK, hook)


def _end_unless(awake: threading.Event) -> None:
    if not awake.wait(_WAKE_S):
        sys.stderr.write(f"still sets up a process group {_WAKE_S:g} s after a fault of another rank\n")
        sys.stderr.flush()
        os._exit(1)  # a new process will replace this process and restore its state


def _reconfigure(part: Any, uuid: int, handles: list[str]) -> None:
    options = torch_names.ReconfigureOptions()
    options.uuid, options.handles = uuid, handles
    part.reconfigure(options).wait()
