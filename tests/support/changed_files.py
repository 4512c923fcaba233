"""What can happen to a file while something has it mapped."""

from __future__ import annotations

import os
from pathlib import Path

WAYS = ("cut", "written", "replaced", "gone")


def change(path: Path, way: str) -> None:
    """Have it happen. What is mapped stays as it was where it is `replaced` or `gone`."""
    match way:
        case "cut":
            os.truncate(path, 0)
        case "written":
            with path.open("r+b") as opened:
                opened.write(b"1")
            os.utime(path, ns=(1, 1))
        case "replaced":
            new = path.with_name("new")
            new.write_bytes(path.read_bytes())
            new.rename(path)
        case "gone":
            path.unlink()
        case _:
            raise ValueError(way)
