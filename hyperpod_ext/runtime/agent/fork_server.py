"""A process that has imported everything once, and forks workers from there in milliseconds.

Imports are most of a worker's restart. The fork server talks to its agent over an inherited socket: a JSON
line in for each worker wanted, a JSON line out with its process id. Workers are forked twice, so that
their parent is the agent (a subreaper) and not this process.

Arguments: the agent's process id, the socket's descriptor, and the modules to import.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from typing import Any, TextIO

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import worker_main as worker

_OURS = (
    "hyperpod_ext.runtime.training.loop",  # with everything a worker of ours needs
    "awscrt.checksums",
)


def main() -> None:
    agent_pid, line = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and Slurm, which signals every process of a step
        signal.signal(signum, signal.SIG_IGN)  # the agent's business; it stops us
    with os.fdopen(os.dup(line), "r", encoding="utf-8") as requests, os.fdopen(line, "w", encoding="utf-8") as answers:
        _say(answers, _preload([*sys.argv[3:], *_OURS]))
        for order in requests:
            _say(answers, {"pid": _fork_twice(json.loads(order), agent_pid)})


def _preload(modules: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return {"error": f"cannot import {module!r}, which restart.preload asks for: {error}"}
    importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()  # it needs torch
    # shared pages stay shared: no collector writes into what all workers inherit
    gc.collect()
    gc.freeze()
    return {"ready": time.monotonic() - began}


def _fork_twice(order: dict[str, Any], agent_pid: int) -> int:
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reading)
        grandchild = os.fork()
        if grandchild == 0:
            os.close(writing)
            worker.main(order, agent_pid)  # never returns
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
