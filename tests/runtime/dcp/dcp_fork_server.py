"""Forks ranks from a process that has imported torch already: imports are most of a short test.

A line of JSON in, the process id out. Each rank runs one function of dcp_scenes and leaves what it returned,
or what it raised, in a file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "support"))


def main() -> None:
    import awscrt.checksums  # noqa: F401
    import dcp_scenes
    import torch
    import torch._dynamo  # what FSDP and optimizers import on first use; it takes longer than the rest of a test

    from hyperpod_ext.runtime.memory_server.client import start

    start.subprocess = SimpleNamespace(Popen=_start_memory_server, DEVNULL=None)  # type: ignore[assignment]
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks here
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os._exit(_be_rank(dcp_scenes, request))
        print(pid, flush=True)


def _start_memory_server(command: list[str], *, env: dict[str, str], stdout: int, **_: Any) -> Any:
    """As `subprocess.Popen`, forked from the run's process with the imports done: a rank has threads, and may not."""
    import warm

    with os.fdopen(os.dup(stdout), "wb") as log:
        return warm.start(warm.MEMORY_SERVER, command[3:], env=env, log=log, modules=warm.LIGHT)


def _be_rank(scenes: Any, request: dict[str, Any]) -> int:
    os.environ.update(request["environ"])
    result = Path(request["result"])
    log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.dump_traceback_later(30)  # the test gives up soon after, and shows the log
    try:
        answer = {"returned": scenes.play(request["scene"], request["init"], request["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        answer = {"raised": type(error).__name__, "text": f"{error}\n{traceback.format_exc()}"}
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    partial.rename(result)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    main()
