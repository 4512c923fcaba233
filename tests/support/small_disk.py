"""File systems of a test's own, which can be full or read-only while everything else is as it was."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """`folder` as a file system of `size`. Without the right to mount the test is skipped, unless this is CI."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"a file system of its own needs root: {getattr(error, 'stderr', '') or error}")
    try:
        yield folder
    finally:
        while folder.is_mount():
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, but: int = 0) -> Path:
    """Fill the file system of `folder` to the last page, `but` for some bytes; returns the file to remove."""
    file = folder / "others"
    file.write_bytes(bytes(free(folder) - but))
    return file


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_bsize


def make_read_only(folder: Path) -> None:
    """As the kernel does after an error of the disk: files that are open can still be written."""
    _mount("--bind", str(folder), str(folder))
    _mount("-o", "remount,bind,ro", str(folder))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
