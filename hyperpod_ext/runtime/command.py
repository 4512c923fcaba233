"""A worker of target `local` that runs another program: the job's `command`, as a process below it.

`python command.py WORD ...` has the program's exit code; what ends it ends the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def run(words: list[str]) -> int:
    """Start the program, and wait for it."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def end_with_us() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    try:
        program = subprocess.Popen(words, preexec_fn=end_with_us)
    except OSError as error:
        raise SystemExit(f"{words[0]} cannot be started: {error.strerror}") from None
    signal.signal(signal.SIGTERM, lambda number, _frame: program.send_signal(number))
    code = program.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
