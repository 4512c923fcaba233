"""`python3 -m hyperpod_ext.runtime.container_kubernetes [flags] -- script.py [args]`: our agent in a container.

This module is the container's first process. The module takes the agent's flags, passes SIGTERM on to the agent, and
exits with the agent's exit code. This module also copies the workers' log files to the container's output, each line as
`rank 2 | ...`, because Kubernetes and CloudWatch keep only the container's output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import die_with_parent, wait_and_forward

_TICK_S = 0.5


def main() -> None:
    logs = Path(os.environ.get("HPX_RUN_DIR", "hpx-run")) / "logs"
    make_private_folder(logs)
    us = os.getpid()
    agent = subprocess.Popen(
        [sys.executable, "-m", "hyperpod_ext.runtime.agent", "--keep-events", *sys.argv[1:]],
        preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),  # `preexec_fn` is safe in a process with one thread
    )
    code = wait_printing(agent, logs)
    sys.exit(code if code >= 0 else 128 - code)  # killed by signal N: exit code 128 + N


def wait_printing(agent: subprocess.Popen[bytes], logs: Path) -> int:
    """Print the workers' logs until the agent has ended, and pass SIGTERM on to it. Returns the agent's exit code."""
    ended = threading.Event()
    printer = threading.Thread(target=print_logs, args=(logs, ended))
    printer.start()
    try:
        agent.returncode = os.waitstatus_to_exitcode(wait_and_forward(agent.pid, signal.SIGTERM))
        return agent.returncode
    finally:
        ended.set()
        printer.join()


def print_logs(folder: Path, ended: threading.Event) -> None:
    """Print the lines that workers append to the log files in `folder`, until `ended` is set and nothing is left."""
    offsets: dict[Path, int] = {}
    while True:
        last = ended.wait(_TICK_S)
        for file in sorted(folder.glob("*.log")):
            with file.open("rb") as opened:
                opened.seek(offsets.get(file, 0))
                grown = opened.read()
            complete = grown if last else grown[: grown.rfind(b"\n") + 1]
            offsets[file] = offsets.get(file, 0) + len(complete)
            for line in complete.decode(errors="replace").splitlines():
                print(f"{file.stem[:4]} {file.stem[4:]} | {line}", flush=True)  # noqa: T201  (Kubernetes keeps it)
        if last:
            return


if __name__ == "__main__":
    main()
