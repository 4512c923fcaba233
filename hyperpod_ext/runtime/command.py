"""Runs a job's `command`, which need not be Python, as the child process of a worker of target `local`.

`python command.py WORD ...` starts the program and exits with its exit code. This process passes SIGTERM on to the
program, and the kernel kills the program when this process dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def run(words: list[str]) -> int:
    """Start the program, wait until it ends, and return its exit code: 128 + N if signal N killed it."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def end_with_us() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    # sigwait instead of a handler, which does not run if the signal arrives just before a blocking call
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        program = subprocess.Popen(words, preexec_fn=end_with_us)
    except OSError as error:
        raise SystemExit(f"{words[0]} cannot be started: {error.strerror}") from None
    while (code := program.poll()) is None:
        if signal.sigwait(awaited) == signal.SIGTERM:
            program.terminate()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
