"""Identifies source files of a token store by name, size, modification time and a checksum of the file's start and end,
without reading the whole files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_ENDS = 64 * 1024


def identify(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one dict per file: `path` (absolute), size, modification time, and a checksum of the file's start and
    end."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            ends = crc64nvme(file.read(_ENDS))
            file.seek(max(status.st_size - _ENDS, 0))
            ends = crc64nvme(file.read(_ENDS), ends)
        known = {"path": str(path.absolute()), "nbytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        found.append({**known, "ends_crc64nvme": f"{ends:016x}"})
    return found


def content_of(identities: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the identities with file names instead of paths. A store's key contains these names, so that a moved
    dataset keeps its key."""
    return [{**each, "path": Path(each["path"]).name} for each in identities]


def changes(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each changed or missing file. Compares only sizes and modification times."""
    found = []
    for known in identities:
        try:
            status = Path(known["path"]).stat()
        except FileNotFoundError:
            found.append(f"{known['path']} is gone")
            continue
        if status.st_size != known["nbytes"]:
            found.append(f"{known['path']} has {status.st_size:,} bytes, and had {known['nbytes']:,} before")
        elif status.st_mtime_ns != known["mtime_ns"]:
            found.append(f"{known['path']} was written to")
    return found
