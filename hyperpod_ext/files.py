"""Files that readers see whole or not at all. Standard library only; shared by the laptop side and the container."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Replace `file`: readers see all of the old text or all of the new."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(file)


def sync_directory(path: Path) -> None:
    """Without this the name of a new file, unlike its bytes, may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
