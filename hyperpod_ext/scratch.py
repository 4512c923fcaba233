"""Folders for sockets that end with the process that made them, also where that was killed.

Each has a file that its owner holds locked. The kernel drops the lock with the owner's last descriptor, so a folder
whose lock is free belongs to nobody: whoever makes the next one removes it. Standard library only; shared by the laptop
side's local engine and the container's agent.
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
"""Characters; sockets live below it, and the kernel allows their paths 107."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder, private to this user (0700), and the descriptor that holds its lock.

    Forked processes have the descriptor too, and own the folder with it; what is executed does not.
    """

    path: Path
    owner: int

    def remove(self) -> None:
        """With all that is in it. Processes that use it have ended."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(prefix: str = PREFIX, within: Path | None = None) -> Scratch:
    """A new folder in the temporary directory; those that lost their owner go first."""
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
    draft.rename(path / _OWNER)  # nobody sees it without its lock
    return Scratch(path, owner)


@contextlib.contextmanager
def scratch_folder(prefix: str = PREFIX, within: Path | None = None) -> Iterator[Path]:
    """A folder for as long as this block lasts."""
    scratch = make_scratch(prefix, within)
    try:
        yield scratch.path
    finally:
        scratch.remove()
        os.close(scratch.owner)


def remove_abandoned(prefix: str = PREFIX, within: Path | None = None) -> list[Path]:
    """Remove this user's folders that have no owner any more, and end what still runs for them; returns them.

    A folder without the file of an owner is somebody else's, or just being made, and stays.
    """
    removed = []
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        if _is_abandoned(folder):
            end_abandoned(folder)
            removed.append(folder)
    return removed


def end_abandoned(folder: Path) -> None:
    """End what runs for a folder whose owner is gone, and remove it."""
    kill_started_for(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it has none, or was removed this moment, or is no folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
