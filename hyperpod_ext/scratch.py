"""Folders for sockets that are removed with the process that made them, even if it is killed.

Each has a file that its owner keeps locked. The kernel releases the lock with the owner's last descriptor. A folder
without a lock is abandoned, and the next `make_scratch` removes it. Standard library only; shared by the laptop side's
local engine and the container's agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.processes import kill_started_for

PREFIX = "hpx-"
_OWNER = "owner"
_LONGEST = 60
"""Most characters: paths of sockets below it may have 107."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder, private to this user (0700), and the descriptor that holds its lock.

    Forked processes inherit the descriptor, and own the folder too; executed programs do not.
    """

    path: Path
    owner: int

    def remove(self) -> None:
        """Remove the folder with its content. Processes that use it must have ended."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(prefix: str = PREFIX, within: Path | None = None) -> Scratch:
    """Make a new folder in the temporary directory, after removing abandoned ones."""
    remove_abandoned(prefix, within)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
    if within is None and len(str(path)) > _LONGEST:
        path.rmdir()
        within = Path("/tmp")
        remove_abandoned(prefix, within)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
    draft = path / f"{_OWNER}.draft"
    owner = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    draft.rename(path / _OWNER)  # it is never visible without its lock
    return Scratch(path, owner)


@contextlib.contextmanager
def scratch_folder(prefix: str = PREFIX, within: Path | None = None) -> Iterator[Path]:
    """Make a folder for the time of the block."""
    scratch = make_scratch(prefix, within)
    try:
        yield scratch.path
    finally:
        scratch.remove()
        os.close(scratch.owner)


def remove_abandoned(prefix: str = PREFIX, within: Path | None = None) -> list[Path]:
    """Remove this user's abandoned folders, kill processes that use them, and return the folders.

    A folder without an owner's file is another program's, or is just being made, and stays.
    """
    removed = []
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        if _is_abandoned(folder):
            end_abandoned(folder)
            removed.append(folder)
    return removed


def end_abandoned(folder: Path) -> None:
    """Kill processes that use an abandoned folder, and remove it."""
    kill_started_for(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no owner's file, just removed, or no folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
