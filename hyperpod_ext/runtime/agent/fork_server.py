"""A process that has imported everything once, and forks workers from there in milliseconds.

Imports are most of a worker's restart. The fork server talks to its agent over an inherited socket: a JSON
line in for each worker wanted, a JSON line out with its process id. Workers are forked twice, so that
their parent is the agent (a subreaper) and not this process. Asked to keep warm spares, it has workers become of those.

A child of a process that has initialized CUDA cannot use a GPU. So a module whose import does that is refused, by name.
A child of a process with threads may hang at a lock that one of them held. So a module whose import starts one is left
to the workers: this process begins again without it.

Arguments: the agent's process id, the socket's descriptor, and the modules to import.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import worker_main as worker
from hyperpod_ext.runtime.agent.warm_spares import WarmSpares
from hyperpod_ext.runtime.detection.failure_causes import one_line
from hyperpod_ext.runtime.ipc.declared import build_all
from hyperpod_ext.standard_streams import lose_unwritable_output

_OURS = (
    "hyperpod_ext.runtime.training.loop",  # with everything a worker of ours needs
    "awscrt.checksums",
)
_DRIVER = "libcuda.so.1"
_LEFT_OUT = "HPX_NOT_PRELOADED"
"""Reasons why modules are not preloaded, one a line, from this process's former self."""
_BEGINS_S = 0.05
"""After so long a thread that was started runs Python code, if it is to."""
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available()` asks NVML: modules call that on import, and it would initialize CUDA here."""


def main() -> None:
    lose_unwritable_output()
    agent_pid, line = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and Slurm, which signals every process of a step
        signal.signal(signum, signal.SIG_IGN)  # the agent's business; it stops us
    os.environ.setdefault(_NVML_CHECK, "1")  # for workers, too: it is right in them as well
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
    """Be a new process of this id, without the threads of this one, which preloads `modules`."""
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
    """Import these and what every worker needs.

    Returns the seconds under `ready`, with `notes` on modules that loaded little; or an `error` that says what is
    wrong. If a module's import has started a thread, `threaded` is that module.
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
        if note := _loads_later(module, loaded):
            notes.append(note)
    importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()  # it needs torch
    importlib.import_module("hyperpod_ext.runtime.torch_requirements.private_names").look_up_loaded()
    build_all()
    # shared pages stay shared: no collector writes into what all workers inherit
    gc.collect()
    gc.freeze()
    return {"ready": time.monotonic() - began} | ({"notes": notes} if notes else {})


def load(name: str) -> Any:
    """A module, or what a module has by that name: `trl.GRPOTrainer` loads what a lazy package has it from.

    Raises:
        ImportError: there is neither.
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
    """Threads of this process, of Python or not."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _loads_later(name: str, loaded: Any) -> str:
    """A sentence on a package that loads most of its parts when they are first used; empty: it is none."""
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
    """Whether this process has initialized CUDA. Its open files do not tell: NVML opens the same devices, and a process
    that has asked it can be forked."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # it is not loaded
        return False
    count = ctypes.c_int(0)
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0  # before cuInit: CUDA_ERROR_NOT_INITIALIZED


def _fork_twice(run: Callable[[], NoReturn]) -> int:
    """Process id of a child in which `run` is called. Its parent is whoever adopts orphans here: the agent."""
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


if __name__ == "__main__":
    main()
