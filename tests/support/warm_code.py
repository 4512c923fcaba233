"""A program's text, run in a process that is forked from one with everything imported, as `python -c` would run it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import warm


def main() -> None:
    exec(compile(sys.argv[1], "<program>", "exec"), {"__name__": "__main__"})


def run(program: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """To its end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = warm.start("warm_code", [program], env=os.environ, log=output, errors=errors)
        code = process.wait(timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess([program], code, *texts)


if __name__ == "__main__":
    main()
