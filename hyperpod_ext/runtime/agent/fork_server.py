"""The fork server: a process that imports all modules once, and can then fork workers within milliseconds.

Without a fork server, imports would take most of the time of a worker's restart. The agent and the fork server
communicate over an inherited socket: for each new worker, the agent sends a JSON line, and receives a JSON line with
the process id. Each worker is forked by an intermediate process that ends at once, so that the worker becomes a child
of the agent (a subreaper) and not of the fork server. If a warm spare (a forked process with a CUDA context) is ready,
the warm spare becomes the worker.

If a module initializes CUDA on import, the fork server fails with an error that names the module, because forked
children of a process with CUDA cannot use a GPU. If a module starts a thread on import, the fork server restarts
without the module, which each worker then imports itself, because forked children of a process with several threads may
hang at a lock.

Command-line arguments: the agent's process id, the file descriptor of the socket, and the modules to import.
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
    "hyperpod_ext.runtime.training.loop",  # imports all other modules that a worker needs
    "awscrt.checksums",
)
_DRIVER = "libcuda.so.1"
_LEFT_OUT = "HPX_NOT_PRELOADED"
"""Environment variable with the reasons why modules are not imported in advance, one reason per line. The fork server
sets this variable before it restarts itself without the modules."""
_BEGINS_S = 0.05
"""Number of seconds within which a new Python thread surely runs its first instruction."""
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable that makes `torch.cuda.is_available()`, which some modules call on import, use NVML. Imports in
the fork server must not initialize CUDA."""

_READY = b"r"
_ROOM = 1 / 16
"""Share of a GPU's memory that must still be free after a warm spare has created its CUDA context."""
Fork = Callable[[Callable[[], NoReturn]], int]
"""Function that runs another function in a new child process of the agent, and returns the child's process id."""


def main() -> None:
    lose_unwritable_output()
    agent_pid, line = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    # ignore signals that Ctrl-C and Slurm send to all processes: the agent handles them, and stops the fork server
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    # workers may inherit this variable
    os.environ.setdefault(_NVML_CHECK, "1")
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
    """Restart the fork server in the same process with exec, which ends all threads. The restarted fork server imports
    only `modules` in advance."""
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
    """Import `modules`, then the modules that every worker needs.

    On success, the returned dict has the keys `ready` (number of seconds that the imports took) and perhaps `notes`
    (sentences on packages that loaded only a small part of themselves). On failure, the dict has the key `error` (the
    error message), and the key `threaded` (a module's name) if the module started a thread on import.
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
    # imported by name, because these modules import torch
    importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()
    importlib.import_module("hyperpod_ext.runtime.torch_requirements.private_names").look_up_loaded()
    build_all()
    # keeps a worker's garbage collector from writing to memory pages that are shared with the fork server
    gc.collect()
    gc.freeze()
    return {"ready": time.monotonic() - began} | ({"notes": notes} if notes else {})


def load(name: str) -> Any:
    """Import a module, or load an attribute of a module. Loading `trl.GRPOTrainer`, for example, imports all modules
    that this class in a lazy package needs.

    Raises:
        ImportError: `name` is neither a module nor an attribute of a module.
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
    """Return the number of this process's threads, including threads that were not started by Python."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def loads_later(name: str, loaded: Any) -> str:
    """Return a warning if the package `loaded` loads most of its attributes only on first use; otherwise an empty
    string."""
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
        "worker that is forked while this thread runs may hang at a lock that the thread held."
    )


def _initialized_by(module: str) -> str:
    return (
        f"the import of {module!r}, which restart.preload asks for, initialized CUDA. A worker that is forked after "
        "that cannot use its GPU. Remove the module from restart.preload, or let it use CUDA only in the "
        "training function."
    )


def cuda_is_initialized() -> bool:
    """Return whether this process has initialized CUDA. Open device files do not prove that CUDA is initialized,
    because NVML opens the same files. A process that has used only NVML can fork workers."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # the CUDA driver library is not loaded
        return False
    count = ctypes.c_int(0)
    # before cuInit, cuDeviceGetCount fails with CUDA_ERROR_NOT_INITIALIZED
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0


def _fork_twice(run: Callable[[], NoReturn]) -> int:
    """Call `run` in a grandchild process, and return the grandchild's process id. The intermediate process ends at
    once, so that the grandchild becomes a child of the agent."""
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
    """The warm spares: processes that have a CUDA context, each of which can become the next worker of its local rank.

    On an H200, creating a CUDA context takes 0.15 s and 684 MiB of GPU memory. A warm spare is forked while the job
    trains, and ends if its GPU has too little free memory. Measurements are in docs/gpu.md, section "Warm spares".
    """

    def __init__(self, fork: Fork, agent_pid: int) -> None:
        self._fork, self._agent_pid = fork, agent_pid
        self._spares: dict[int, _Spare] = {}

    def keep(self, local_ranks: list[int]) -> list[int]:
        """Start a warm spare for each local rank that has no warm spare, if this node has a GPU. Returns the process
        ids of the new warm spares."""
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
        """Send a worker's order to the warm spare of the same local rank, which becomes the worker. Returns the warm
        spare's process id; None if no warm spare is ready."""
        local_rank = int(order["env"]["LOCAL_RANK"])
        spare = self._spares.get(local_rank)
        if spare is None or _peeked(spare) != _READY:
            return None
        del self._spares[local_rank]
        with spare.line, contextlib.suppress(OSError):  # the warm spare may have ended
            spare.line.recv(len(_READY))
            spare.line.sendall(json.dumps(order).encode() + b"\n")
            return spare.pid
        return None

    def forget(self) -> None:
        """Close this process's copies of the sockets to all warm spares. Called in forked children: only the fork
        server itself uses these sockets."""
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
    """Return the number of GPUs, at most 255. A child process counts the GPUs, because torch uses NVML, which would
    leave a thread and open device files in the fork server."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            os._exit(min(torch.cuda.device_count(), 255))
        except BaseException:  # the child must not continue with the fork server's code
            traceback.print_exc()
            os._exit(0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _peeked(spare: _Spare) -> bytes | None:
    """Return `_READY` if the warm spare is ready, b"" if it has ended, and None if it is not ready yet."""
    try:
        return spare.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def _wait(line: socket.socket, local_rank: int, agent_pid: int) -> NoReturn:
    """Be a warm spare: create a CUDA context, wait for a worker's order, and become this worker. The process exits if
    the fork server ends."""
    worker.close_inherited(kept=line.fileno())
    worker.wait_adopted(agent_pid)
    die_with_parent(agent_pid)
    order = b""
    try:
        if _make_context(local_rank):
            line.sendall(_READY)
            with line.makefile("rb") as orders:
                order = orders.readline()
    except Exception as error:
        # if the error persists, a worker that is forked later reports it
        sys.stderr.write(f"the warm spare of local rank {local_rank} ended: {error}\n")
    if not order.endswith(b"\n"):
        os._exit(0)
    line.close()
    worker.main(json.loads(order), agent_pid)


def _make_context(local_rank: int) -> bool:
    """Create a CUDA context on the GPU of `local_rank`. Returns whether the GPU still has enough free memory for the
    job."""
    import torch

    # use the device that the worker will use
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
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
