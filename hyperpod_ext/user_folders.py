"""Folders of the present user. Many containers run without HOME, and with a user id that /etc/passwd does not contain.

The module needs only the standard library, because the engine of a local job imports it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder $XDG_STATE_HOME, or ~/.local/state if the variable is not set.

    Raises:
        HyperpodExtError: neither XDG_STATE_HOME nor HOME is set, and the user has no entry in /etc/passwd.
    """
    given = environ.get("XDG_STATE_HOME")
    return Path(given) if given else home_folder("XDG_STATE_HOME", environ) / ".local" / "state"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder $XDG_CACHE_HOME, or ~/.cache if the variable is not set.

    Raises:
        HyperpodExtError: neither XDG_CACHE_HOME nor HOME is set, and the user has no entry in /etc/passwd.
    """
    given = environ.get("XDG_CACHE_HOME")
    return Path(given) if given else home_folder("XDG_CACHE_HOME", environ) / ".cache"


def home_folder(instead: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder $HOME, or the user's home folder in /etc/passwd if HOME is not set.

    Args:
        instead: name of an environment variable that the user can set instead of HOME, for the hint of the error.

    Raises:
        HyperpodExtError: HOME is not set, and the user has no entry in /etc/passwd.
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
    """Return `path` with a leading `~` or `~USER` replaced by the home folder of the user.

    Raises:
        HyperpodExtError: `path` begins with `~`, and the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise HyperpodExtError(
            f"{os.fspath(path)}: `~` stands for a home folder, and this user has none",
            hint="Write the whole path, or set HOME.",
        ) from error
