"""Runs a job's `command`, which need not be Python, as the child process of a worker of target `local`.

`python command.py WORD ...` starts the program and exits with its exit code. This process passes SIGTERM on to the
program, and the kernel kills the program when this process dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from hyperpod_ext.processes import die_with_parent, wait_and_forward


def run(words: list[str]) -> int:
    """Start the program, wait until it ends, and return its exit code: 128 + N if signal N killed it."""
    parent = os.getpid()
    try:
        program = subprocess.Popen(words, preexec_fn=lambda: die_with_parent(parent))
    except OSError as error:
        raise SystemExit(f"{words[0]} cannot be started: {error.strerror}") from None
    program.returncode = os.waitstatus_to_exitcode(wait_and_forward(program.pid, signal.SIGTERM))
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
