"""Packs the script's folder into an archive. The same files always give the same bytes."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ext.errors import ConfigError, Problem

_LEFT_OUT = frozenset({".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "hpx-runs"})
MOST_BYTES = 512 << 20


def pack(folder: Path) -> bytes:
    """Return a `.tar.gz` of the files below `folder`, except caches, `.venv`, `.git`, `hpx-runs` and symbolic links.

    Raises:
        ConfigError: the files have more than `MOST_BYTES` in total.
    """
    files = list(_files(folder))
    total = sum(file.stat().st_size for file in files)
    if total > MOST_BYTES:
        hint = "put data into a channel, or name an archive in sagemaker.code"
        raise ConfigError(
            [
                Problem(
                    f"{folder} has {total >> 20} MiB of files, without caches, which is too much to upload",
                    path="script",
                    hint=hint,
                )
            ]
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file in files:
            entry = archive.gettarinfo(file, str(file.relative_to(folder)))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            with file.open("rb") as opened:
                archive.addfile(entry, opened)
    return packed.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        yield from (file for name in sorted(names) if (file := Path(place, name)).is_file() and not file.is_symlink())
