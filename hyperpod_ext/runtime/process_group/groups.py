"""Opens, aborts and closes torch's process groups: a generation's default group, and the other groups of the script.

The training loop calls this module when a generation begins or ends, and the control plane calls it to abort the
groups. The interface of the backends (gloo, NCCL) is in `backend.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.process_group import broken_waits
from hyperpod_ext.runtime.process_group import torch_private as torch_names
from hyperpod_ext.runtime.process_group.backend import Backend
from hyperpod_ext.runtime.process_group.gloo_backend import Gloo
from hyperpod_ext.runtime.process_group.lasting_groups import LastingGroups, can_last
from hyperpod_ext.runtime.process_group.nccl.environment import without_reconfigure
from hyperpod_ext.runtime.process_group.nccl_backend import Nccl
from hyperpod_ext.runtime.process_group.store import PartitionedStore

Kind = Literal["gloo", "nccl"]
"""Backend for collectives of GPU tensors. Collectives of CPU tensors use gloo in any case."""
TORCH_NAMES: dict[Kind, str] = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""The argument `backend` of torch's `init_process_group`, for each `Kind`."""


def choose(wanted: Kind | None) -> Kind:
    """Return the backend to use for groups. If `wanted` is None, choose NCCL if this process can use a GPU, else gloo.

    Raises:
        JobFailedError: NCCL is requested, but NCCL or a GPU is missing.
    """
    missing = _no_nccl()
    if wanted == "nccl" and missing:
        raise JobFailedError(
            f"process_group_backend is 'nccl', and {missing}",
            hint="Remove process_group_backend from the job, or run it where each rank has a GPU.",
        )
    return "gloo" if wanted == "gloo" or missing else "nccl"


def _no_nccl() -> str:
    """Return why this process cannot use NCCL; empty if it can."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    return "" if torch.cuda.is_available() else "this process sees no GPU"


class ProcessGroups:
    """The default process group of one generation, and the script's other groups, such as those of device meshes."""

    def __init__(self) -> None:
        torch_names.check()
        broken_waits.watch(self.is_broken)
        self.backends: list[Backend] = [Gloo()]
        """Backends of the open groups: gloo, and NCCL if the job uses it."""
        self._store: PartitionedStore | None = None
        self._lasting: LastingGroups | None = None
        self.before_abort: Callable[[], None] = lambda: None
        """Called before each abort, in the aborting thread: the thread that receives messages, or a backend's
        thread."""
        self._lock = threading.Lock()

    def open(self, store: PartitionedStore, rank: int, world_size: int, kind: Kind) -> None:
        """Open the default process group with `store`. Another thread may abort the group during the call.

        Before `open` is called, every rank must have left the former generation.

        Args:
            kind: backend for GPU tensors, which must be the same on all ranks and in all generations.

        Raises:
            ConfigError: NCCL cannot be aborted with this environment or these versions of libraries.
            JobFailedError: the script itself has opened a default group, or another rank uses a different backend.
        """
        if self._lasting is not None and self._lasting.place != (rank, world_size):
            self._end(self._destroy_groups)
        if dist.is_initialized() and self._lasting is None:
            raise JobFailedError(
                "a process group is open already; under @resilient, hyperpod_ext opens the groups",
                hint="Remove init_process_group (and destroy_process_group) from the script.",
            )
        if self._lasting is None and can_last(world_size, nccl=kind == "nccl"):
            self._lasting = LastingGroups(rank, world_size, TORCH_NAMES[kind], lambda: self.before_abort())
        if kind == "nccl" and len(self.backends) == 1:
            self.backends.append(Nccl.prepare())
        for backend in self.backends:
            backend.enter(world_size, lasting=self._lasting is not None)
        with self._lock:
            self._store = store
        _agree(store, rank, world_size, kind)
        torch_names.on_new_group(self._make)
        if self._lasting is not None:
            self._lasting.open(store)
        else:
            nccl = f"cuda:{without_reconfigure(torch.__version__, os.environ)}"
            names = TORCH_NAMES[kind].replace("cuda:nccl", nccl)
            dist.init_process_group(names, store=store, rank=rank, world_size=world_size)
        for backend in self.backends:
            backend.opened()

    def _make(self, name: str, ranks: Sequence[int], make: Callable[..., Any]) -> Any:
        """Make a group of `ranks` by torch's function `make`. If `ranks` is empty, the group is the default group."""
        for backend in self.backends if ranks else ():
            backend.adding_group()
        if self._store is not None and ranks:
            self._store.route(name, ranks)
        return make() if self._lasting is None else self._lasting.make(name, ranks, make)

    def abort(self) -> None:
        """Make all calls that wait in the groups raise at once. Any thread may call `abort` at any time, repeatedly."""
        self.before_abort()
        with self._lock:
            store = self._store
        if store is not None:
            store.cancel()
        for backend in self.backends:
            backend.abort()
        if (lasting := self._lasting) is not None:
            lasting.give_up()

    def is_broken(self, error: BaseException) -> bool:
        """Return whether the error means that a group has lost a rank."""
        return isinstance(error, dist.DistError) or any(backend.is_broken(error) for backend in self.backends)

    def leave(self) -> None:
        """Leave a generation. Keeps the group objects if torch can reconfigure groups; otherwise destroys the groups.

        The caller must first drop all DDP modules and work handles of groups that will be destroyed, because they keep
        the groups' threads alive.

        Raises:
            AbortStuckError: this process cannot leave the generation.
        """
        self._end(self._destroy_groups if self._lasting is None else self._lasting.leave)

    def close(self) -> None:
        """Destroy the groups after every rank has stopped using them."""
        self._end(self._destroy_groups)
        for backend in self.backends:
            backend.close()

    def asleep(self) -> frozenset[str] | None:
        """Return the names of kept groups that contain only this rank until the script requests them again. Returns
        None if this job does not keep groups."""
        return None if self._lasting is None else self._lasting.asleep()

    def _end(self, end_groups: Callable[[], None]) -> None:
        torch_names.on_new_group(None)
        with self._lock:
            store, self._store = self._store, None
        with contextlib.ExitStack() as ending:
            for backend in self.backends:
                ending.enter_context(backend.ending())
            if dist.is_initialized():
                end_groups()
        if self._lasting is None:
            torch_names.forget_groups()
        if store is not None:
            store.close()

    def _destroy_groups(self) -> None:
        self._lasting = None
        dist.destroy_process_group()


def _agree(store: PartitionedStore, rank: int, world_size: int, kind: Kind) -> None:
    """Check that all ranks use the same backend, so that no rank with NCCL waits for a rank without a GPU."""
    store.set(f"backend/{rank}", kind)
    if kind == "gloo":  # only the ranks with NCCL compare the backends
        return
    for other in sorted({(rank - 1) % world_size, (rank + 1) % world_size}):
        if (theirs := store.get(f"backend/{other}").decode()) != kind:
            raise JobFailedError(
                f"rank {rank} opens process groups with {kind}, but rank {other} with {theirs}",
                hint="Give each rank a GPU, or set process_group_backend: gloo in the job.",
            )
