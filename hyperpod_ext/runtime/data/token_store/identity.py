"""Identifies source files of a token store by name, size, time and checksum of both ends, without reading all of
them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_ENDS = 64 * 1024


def identify(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one entry per file: `path` (absolute), size, modification time, and a checksum of both ends of the
    file."""
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
    """Return the identities with file names instead of paths, for a store's key: a moved dataset keeps its key."""
    return [{**each, "path": Path(each["path"]).name} for each in identities]


def changes(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each changed or missing file. Only sizes and modification times are compared."""
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
