"""Folders of this user. Containers often run with a user id without an entry in /etc/passwd, and without HOME.

Standard library only: a local job's engine imports this first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $XDG_STATE_HOME, or ~/.local/state. Raises HyperpodExtError as `home_folder` does."""
    given = environ.get("XDG_STATE_HOME")
    return Path(given) if given else home_folder("XDG_STATE_HOME", environ) / ".local" / "state"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $XDG_CACHE_HOME, or ~/.cache. Raises HyperpodExtError as `home_folder` does."""
    given = environ.get("XDG_CACHE_HOME")
    return Path(given) if given else home_folder("XDG_CACHE_HOME", environ) / ".cache"


def home_folder(instead: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return $HOME, or the home folder in /etc/passwd.

    Args:
        instead: the variable that names the wanted folder itself, for the hint of the error.

    Raises:
        HyperpodExtError: HOME is not set, and this user has no entry in /etc/passwd.
    """
    if given := environ.get("HOME"):
        return Path(given)
    try:
        return Path.home()
    except RuntimeError as error:
        raise HyperpodExtError(
            f"user {os.getuid()} has no home folder: HOME is not set, and /etc/passwd has no entry for this user",
            hint=f"Set {instead}, or HOME, to a folder that this user can write to.",
        ) from error


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return `path` with the home folder in place of a leading `~`.

    Raises:
        HyperpodExtError: it begins with `~`, and that user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise HyperpodExtError(
            f"{os.fspath(path)}: `~` stands for a home folder, and this user has none",
            hint="Write the whole path, or set HOME.",
        ) from error
