"""File systems of a test's own, which can be full or read-only while everything else is as it was."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def freezable(folder: Path) -> Iterator[Callable[[], None]]:
    """`folder` as a file system that a call freezes until the end: processes that write there wait, and cannot be ended
    by SIGKILL. Without the right to do that the test is skipped, unless this is CI."""
    image = folder.with_suffix(".img")
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(256 << 20)  # sparse
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True, text=True)
        _mount("-o", "loop", str(image), str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"a file system to freeze needs root and a loop device: {getattr(error, 'stderr', '') or error}")
    try:
        yield lambda: subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """As the kernel does after an error of the disk: files that are open can still be written."""
    _mount("--bind", str(folder), str(folder))
    _mount("-o", "remount,bind,ro", str(folder))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
