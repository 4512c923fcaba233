"""Programs that tests put in the place of others."""

from __future__ import annotations

import stat
import sys
from pathlib import Path


def python_program(path: Path, script: str) -> Path:
    """`script` as a program at `path`, for this interpreter wherever it lies: a `#!` line would stop at a space.

    The shell leaves at the second line, which to Python is a string.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""#!/bin/sh\n'''exec' '{sys.executable}' "$0" "$@"\n' '''\n{script}""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
