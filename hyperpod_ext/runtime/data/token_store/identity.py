"""Identifies a store's source files by name, size, time and both ends, without reading the whole files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_ENDS = 64 * 1024


def identify(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one entry per file: `path`, by which it can be found again, and its size, time and checksum of both
    ends."""
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
    """Return the part of the identities for a store's key, without folders, so that a moved dataset stays the same."""
    return [{**each, "path": Path(each["path"]).name} for each in identities]


def changes(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each changed file. Only sizes and times are compared."""
    found = []
    for known in identities:
        try:
            status = Path(known["path"]).stat()
        except FileNotFoundError:
            found.append(f"{known['path']} is gone")
            continue
        if status.st_size != known["nbytes"]:
            found.append(f"{known['path']} has {status.st_size:,} bytes, it had {known['nbytes']:,}")
        elif status.st_mtime_ns != known["mtime_ns"]:
            found.append(f"{known['path']} was written to")
    return found
