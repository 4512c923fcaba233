"""Folder of this machine's local jobs.

This module imports only the standard library, because the engine process of a local job imports it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hyperpod_ext.user_folders import state_folder


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all local jobs, in $HPX_HOME or the user's state folder."""
    if given := environ.get("HPX_HOME"):
        return Path(given).resolve() / "local"
    return state_folder(environ) / "hyperpod_ext" / "local"
