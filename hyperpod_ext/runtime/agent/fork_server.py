"""A process that has imported everything once, and forks workers from there in milliseconds.

Imports are most of a worker's restart. The fork server talks to its agent over an inherited socket: a JSON
line in for each worker wanted, a JSON line out with its process id. Workers are forked twice, so that
their parent is the agent (a subreaper) and not this process. Asked to keep warm spares, it has workers become of those.

A child of a process that has initialized CUDA cannot use a GPU. So a module whose import does that is refused, by name.

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
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TextIO

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import worker_main as worker
from hyperpod_ext.runtime.agent.warm_spares import WarmSpares
from hyperpod_ext.runtime.ipc.declared import build_all

_OURS = (
    "hyperpod_ext.runtime.training.loop",  # with everything a worker of ours needs
    "awscrt.checksums",
)
_DRIVER = "libcuda.so.1"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available()` asks NVML: modules call that on import, and it would initialize CUDA here."""


def main() -> None:
    agent_pid, line = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and Slurm, which signals every process of a step
        signal.signal(signum, signal.SIG_IGN)  # the agent's business; it stops us
    with os.fdopen(os.dup(line), "r", encoding="utf-8") as requests, os.fdopen(line, "w", encoding="utf-8") as answers:
        os.environ.setdefault(_NVML_CHECK, "1")  # for workers, too: it is right in them as well
        _say(answers, preload(sys.argv[3:]))
        spares = WarmSpares(_fork_twice, agent_pid)
        for request in requests:
            _say(answers, _answer(json.loads(request), spares, agent_pid))


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
    """Import these and what every worker needs: the seconds under `ready`, or an `error` that says what is wrong."""
    began = time.monotonic()
    for module in (*modules, *_OURS):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return {"error": f"cannot import {module!r}, which restart.preload asks for: {error}"}
        if cuda_is_initialized():
            return {"error": _initialized_by(module)}
    importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()  # it needs torch
    importlib.import_module("hyperpod_ext.runtime.torch_requirements.private_names").look_up_loaded()
    build_all()
    # shared pages stay shared: no collector writes into what all workers inherit
    gc.collect()
    gc.freeze()
    return {"ready": time.monotonic() - began}


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
