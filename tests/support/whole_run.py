"""What one test run has once, whichever process asks first: servers, warm processes, results to compare with."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOLDER = "HPX_TEST_RUN"
_ALIVE = "alive"
"""A named pipe that the run's first process holds open: it ends with that, in whatever way that ends."""
_KNOWN: dict[str, Any] = {}
"""What this process has asked for already."""


def folder() -> Path:
    """Folder of the run. Whoever asks first makes it; it is gone when that process has ended."""
    if _FOLDER not in os.environ:
        made = Path(tempfile.mkdtemp(prefix="hpx-run-"))
        owner = os.getpid()
        os.mkfifo(made / _ALIVE)
        os.open(made / _ALIVE, os.O_RDWR)
        os.environ[_FOLDER] = str(made)
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
    return Path(os.environ[_FOLDER])


def once(name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON; it is called once in the whole run. Where it raises, the next one tries again."""
    if name not in _KNOWN:
        file = folder() / f"{name}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(make()))
        _KNOWN[name] = json.loads(file.read_text())
    return _KNOWN[name]


def alive() -> Path:
    """Pipe that can be read to its end when the run is over."""
    return folder() / _ALIVE
