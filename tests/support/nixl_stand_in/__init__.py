"""Stands in for NIXL's package where what happens around it is tested: bytes go over a Unix socket. Nothing of ours.

`environment(folder, ...)` is that of a process which finds it in place of the real one.
"""

from __future__ import annotations

import os
from pathlib import Path

ENV_DOES, ENV_GATE = "NIXL_STAND_IN", "NIXL_STAND_IN_GATE"
_HERE = Path(__file__).parent


def environment(folder: Path, does: str = "read", version: str = "1.5.1") -> dict[str, str]:
    """One in which NIXL does what it should (`read`), is `missing`, is `stuck` at its start, or after some bytes says
    `error`, `hang`s, brings `damage`, or writes zeros `late`, when the file `gate` in that folder is there."""
    installed = folder / f"nixl_cu13-{version}.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu13\nVersion: {version}\n")
    for name in ("nixl_cu12", "nixl_cu13"):
        package = folder / name
        package.mkdir(exist_ok=True)
        for file in ("__init__.py", "_api.py"):
            target = "missing" if does == "missing" or name == "nixl_cu12" else file.removesuffix(".py")
            text = (_HERE / "agent.py").read_text() if target == "_api" else ""
            if target == "missing":
                text = f"raise ModuleNotFoundError('No module named {name}', name={name!r})\n"
            (package / file).write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder), ENV_DOES: does, ENV_GATE: str(folder / "gate")}
