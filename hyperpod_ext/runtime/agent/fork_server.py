"""The fork server: a process that imports all modules once, and forks workers in milliseconds.

Imports take most of the time of a worker's restart. The fork server and its agent communicate over an inherited socket:
the agent sends a JSON line for each new worker, and receives a JSON line with the process id. Workers are forked twice,
so that their parent is the agent (a subreaper) and not the fork server. A warm spare, if kept, becomes the worker
instead.

A child of a process that has initialized CUDA cannot use a GPU, so a module that initializes CUDA on import is refused
by name. A child of a process with threads may hang at a lock that a thread held, so a module that starts a thread on
import is left to the workers: the fork server starts again without the module.

Arguments: the agent's process id, the socket's descriptor, and the modules to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import worker_main as worker
from hyperpod_ext.runtime.detection.failure_causes import one_line
from hyperpod_ext.runtime.ipc.declared import build_all
from hyperpod_ext.standard_streams import lose_unwritable_output

_OURS = (
    "hyperpod_ext.runtime.training.loop",  # imports all modules that a worker needs
    "awscrt.checksums",
)
_DRIVER = "libcuda.so.1"
_LEFT_OUT = "HPX_NOT_PRELOADED"
"""Environment variable with the reasons why modules are not preloaded, one per line. The fork server sets the variable
before it executes itself again."""
_BEGINS_S = 0.05
"""Seconds within which a new Python thread runs its first instruction."""
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes `torch.cuda.is_available()` use NVML instead of CUDA. Some modules call it on import."""

_READY = b"r"
_ROOM = 1 / 16
"""Share of a GPU's memory that must stay free for the job after a spare has made its context."""
Fork = Callable[[Callable[[], NoReturn]], int]
"""Runs a function in a child of the agent, and returns the child's process id."""


def main() -> None:
    lose_unwritable_output()
    agent_pid, line = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C signals the whole process group, Slurm the whole step
        signal.signal(signum, signal.SIG_IGN)  # the agent handles these signals, and stops this process
    os.environ.setdefault(_NVML_CHECK, "1")  # workers inherit the variable, which is correct for them too
    notes = os.environ.pop(_LEFT_OUT, "").splitlines()
    preloaded = preload(sys.argv[3:])
    if module := preloaded.get("threaded"):
        os.environ[_LEFT_OUT] = "\n".join([*notes, f"{preloaded['error']} Each worker imports the module itself."])
        _begin_again(line, [each for each in sys.argv[3:] if each != module])
    if notes:
        preloaded["notes"] = [*notes, *preloaded.get("notes", ())]
    with os.fdopen(os.dup(line), "r", encoding="utf-8") as requests, os.fdopen(line, "w", encoding="utf-8") as answers:
        _say(answers, preloaded)
        spares = WarmSpares(_fork_twice, agent_pid)
        for request in requests:
            _say(answers, _answer(json.loads(request), spares, agent_pid))


def _begin_again(line: int, modules: Sequence[str]) -> NoReturn:
    """Execute this program again in this process, which ends its threads, and preload only `modules`."""
    os.set_inheritable(line, True)
    arguments = [sys.argv[1], str(line), *modules]
    os.execv(sys.executable, [sys.executable, "-m", "hyperpod_ext.runtime.agent.fork_server", *arguments])


def _answer(order: dict[str, Any], spares: WarmSpares, agent_pid: int) -> dict[str, Any]:
    if (local_ranks := order.get("keep_warm")) is not None:
        return {"pids": spares.keep(local_ranks)}
    pid = spares.take(order)
    if pid is not None:
        return {"pid": pid, "warm": True}

    def become_worker() -> NoReturn:
        spares.forget()
        worker.close_inherited()
        worker.main(order, agent_pid)

    return {"pid": _fork_twice(become_worker), "warm": False}


def preload(modules: Iterable[str]) -> dict[str, Any]:
    """Import `modules`, and the modules that every worker needs.

    Returns the seconds under `ready`, with `notes` on modules that loaded only a small part. On failure returns a
    message under `error`. If a module started a thread on import, its name is under `threaded`.
    """
    began = time.monotonic()
    notes, threads, tasks = [], set(sys._current_frames()), _tasks()
    for module in (*modules, *_OURS):
        try:
            loaded = load(module)
        except Exception as error:
            return {"error": f"cannot import {module!r}, which restart.preload asks for: {one_line(error)}"}
        if cuda_is_initialized():
            return {"error": _initialized_by(module)}
        if (now := _tasks()) > tasks:
            time.sleep(_BEGINS_S)
        tasks = now
        if module not in _OURS and (started := set(sys._current_frames()) - threads):
            return {"error": _started_thread(module, started.pop()), "threaded": module}
        if note := loads_later(module, loaded):
            notes.append(note)
    importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()  # the module needs torch
    importlib.import_module("hyperpod_ext.runtime.torch_requirements.private_names").look_up_loaded()
    build_all()
    # keep inherited memory pages shared: the garbage collector must not write to them
    gc.collect()
    gc.freeze()
    return {"ready": time.monotonic() - began} | ({"notes": notes} if notes else {})


def load(name: str) -> Any:
    """Import a module or an attribute of a module. For example, `trl.GRPOTrainer` loads that part of a lazy package.

    Raises:
        ImportError: `name` is neither a module nor an attribute.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        module, _, attribute = name.rpartition(".")
        if not module or error.name != name:
            raise
        try:
            return getattr(load(module), attribute)
        except AttributeError:
            raise error from None


def _tasks() -> int:
    """Return the number of threads of this process, including those not started by Python."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def loads_later(name: str, loaded: Any) -> str:
    """Return a sentence about a package that loads most of its parts on first use; empty for any other module."""
    if not isinstance(loaded, ModuleType):
        return ""
    public = [each for each in dir(loaded) if not each.startswith("_")]
    later = [each for each in public if each not in vars(loaded)]
    if 2 * len(later) <= len(public):
        return ""
    return (
        f"{name}, which restart.preload names, loads {len(later)} of its {len(public)} parts when they are first used, "
        f"so little of it is preloaded. Name the parts that the script uses, such as {name}.{later[0]}."
    )


def _started_thread(module: str, ident: int) -> str:
    names = {each.ident: each.name for each in threading.enumerate()}
    return (
        f"the import of {module!r}, which restart.preload names, started the thread {names.get(ident, ident)!r}. A "
        "worker that is forked while it runs may hang at a lock that the thread held."
    )


def _initialized_by(module: str) -> str:
    return (
        f"the import of {module!r}, which restart.preload asks for, initialized CUDA. A worker that is forked after "
        "that cannot use its GPU. Remove the module from restart.preload, or have it use CUDA no earlier than in the "
        "training function."
    )


def cuda_is_initialized() -> bool:
    """Return whether this process has initialized CUDA. Open device files do not prove it: NVML opens the same devices,
    and a process that has used only NVML can still be forked."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # the driver is not loaded
        return False
    count = ctypes.c_int(0)
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0  # fails with CUDA_ERROR_NOT_INITIALIZED before cuInit


def _fork_twice(run: Callable[[], NoReturn]) -> int:
    """Call `run` in a grandchild process. The agent adopts it, because its parent ends at once. Returns the process
    id."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reading)
        grandchild = os.fork()
        if grandchild == 0:
            os.close(writing)
            run()
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        pid = int(pipe.read())
    os.waitpid(middle, 0)
    return pid


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


@dataclass(frozen=True)
class _Spare:
    pid: int
    line: socket.socket


class WarmSpares:
    """Processes with a CUDA context, each ready to become the next worker of its local rank.

    A context takes 0.15 s and 684 MiB on an H200. A spare is forked while the job trains, and ends if its GPU has too
    little free memory. Measurements on a GPU: docs/gpu.md, "Warm spares".
    """

    def __init__(self, fork: Fork, agent_pid: int) -> None:
        self._fork, self._agent_pid = fork, agent_pid
        self._spares: dict[int, _Spare] = {}

    def keep(self, local_ranks: list[int]) -> list[int]:
        """Start a spare for each local rank without one, if this node has a GPU. Returns the new process ids."""
        if not self._gpus:
            return []
        for local_rank in [*self._spares]:
            if _peeked(self._spares[local_rank]) == b"":
                self._spares.pop(local_rank).line.close()
        missing = [local_rank for local_rank in local_ranks if local_rank not in self._spares]
        return [self._start(local_rank) for local_rank in missing]

    @cached_property
    def _gpus(self) -> int:
        return _count_gpus()

    def take(self, order: dict[str, Any]) -> int | None:
        """Send the order to the spare of its local rank, which becomes the worker. Returns the spare's process id; None
        if no
        spare is ready."""
        local_rank = int(order["env"]["LOCAL_RANK"])
        spare = self._spares.get(local_rank)
        if spare is None or _peeked(spare) != _READY:
            return None
        del self._spares[local_rank]
        with spare.line, contextlib.suppress(OSError):  # an error means that the spare has ended
            spare.line.recv(len(_READY))
            spare.line.sendall(json.dumps(order).encode() + b"\n")
            return spare.pid
        return None

    def forget(self) -> None:
        """Close the sockets of all spares in a forked child, because the spares belong to the fork server."""
        for spare in self._spares.values():
            spare.line.close()
        self._spares.clear()

    def _start(self, local_rank: int) -> int:
        ours, theirs = socket.socketpair()
        with theirs:

            def run() -> NoReturn:
                self.forget()
                ours.close()
                _wait(theirs, local_rank, self._agent_pid)

            pid = self._fork(run)
        self._spares[local_rank] = _Spare(pid, ours)
        return pid


def _count_gpus() -> int:
    """Count GPUs, up to 255, in a child process. torch uses NVML, which leaves a thread and open devices behind, and a
    process that forks should have neither."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            os._exit(min(torch.cuda.device_count(), 255))
        except BaseException:  # the child must not continue as the fork server
            traceback.print_exc()
            os._exit(0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _peeked(spare: _Spare) -> bytes | None:
    """Return `_READY`, or b"" if the spare has ended, or None if the spare is not ready yet."""
    try:
        return spare.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def _wait(line: socket.socket, local_rank: int, agent_pid: int) -> NoReturn:
    """Make a CUDA context, wait for an order, and become the ordered worker. Exits when the fork server ends."""
    worker.close_inherited(kept=line.fileno())
    worker.wait_adopted(agent_pid)
    die_with_parent(agent_pid)
    order = b""
    try:
        if _make_context(local_rank):
            line.sendall(_READY)
            with line.makefile("rb") as orders:
                order = orders.readline()
    except Exception as error:  # the worker is then forked without a spare, and reports the error if it persists
        sys.stderr.write(f"the warm spare of local rank {local_rank} ended: {error}\n")
    if not order.endswith(b"\n"):
        os._exit(0)
    line.close()
    worker.main(json.loads(order), agent_pid)


def _make_context(local_rank: int) -> bool:
    """Make a CUDA context. Returns whether the GPU then has enough free memory for the job."""
    import torch

    torch.cuda.set_device(local_rank % torch.cuda.device_count())  # the same device as for the worker
    torch.cuda.current_blas_handle()
    free, total = torch.cuda.mem_get_info()
    if free < _ROOM * total:
        free_mib, needed_mib = free >> 20, int(_ROOM * total) >> 20
        why = f"{free_mib} MiB of its GPU are free, less than {needed_mib} MiB"
        sys.stderr.write(f"no warm spare for local rank {local_rank}: {why}\n")
        return False
    return True


if __name__ == "__main__":
    main()
