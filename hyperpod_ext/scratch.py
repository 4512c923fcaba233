"""Temporary folders for sockets. A folder is removed after the process that made it has ended, even by SIGKILL.

Each folder has a file that the folder's owner, the process that made the folder, keeps locked. The kernel releases the
lock when the owner ends. A folder whose file is not locked is abandoned, and the next call of `make_scratch` removes
it. The module needs only the standard library, because both the engine of local jobs and the container's agent import
it.
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
"""Maximum number of characters in the path of a folder. Paths of sockets in the folder may have at most 107
characters."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A temporary folder that only this user can enter (mode 0700), and the file descriptor that holds its lock.

    Forked processes inherit the descriptor, so the folder exists until these processes have ended, too. Programs that
    are started with exec do not inherit the descriptor.
    """

    path: Path
    owner: int

    def remove(self) -> None:
        """Remove the folder with its content. All processes that use the folder must end before the call."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(prefix: str = PREFIX, within: Path | None = None) -> Scratch:
    """Remove abandoned folders, and create a new folder.

    Args:
        prefix: prefix of the folder's name.
        within: parent of the new folder. Default: the temporary directory, or /tmp if the path would be too long.
    """
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
    draft.rename(path / _OWNER)  # lock first, then rename, so that `_OWNER` never exists without a lock
    return Scratch(path, owner)


@contextlib.contextmanager
def scratch_folder(prefix: str = PREFIX, within: Path | None = None) -> Iterator[Path]:
    """Create a folder as `make_scratch` does, and remove it at the end of the `with` block."""
    scratch = make_scratch(prefix, within)
    try:
        yield scratch.path
    finally:
        scratch.remove()
        os.close(scratch.owner)


def remove_abandoned(prefix: str = PREFIX, within: Path | None = None) -> list[Path]:
    """Remove this user's abandoned folders, and kill processes that use such a folder. Return the removed folders.

    A folder without the locked file is kept, because it belongs to another program or is just being created.
    """
    removed = []
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        if _is_abandoned(folder):
            end_abandoned(folder)
            removed.append(folder)
    return removed


def end_abandoned(folder: Path) -> None:
    """Kill the processes that use an abandoned folder, and remove the folder."""
    kill_started_for(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # keep a folder without a lock file, and a path that is not a folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
