"""Print the interpreter of a Python version: `python tests/support/pythons.py 3.12`. The standard library is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def find(version: str) -> Path | None:
    """Return the interpreter of this version (`3.12`), or None. Searches PATH, pyenv and uv."""
    return next((python for python in _candidates(version) if _version_of(python) == version), None)


def _candidates(version: str) -> Iterator[Path]:
    yield Path(sys.executable)
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from pyenv.glob(f"versions/{version}.*/bin/python{version}")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    yield from uv.glob(f"cpython-{version}.*/bin/python{version}")


def _version_of(python: Path) -> str:
    """The version that the interpreter reports; empty if it does not start, as pyenv's shims of inactive versions."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    found = find(sys.argv[1])
    if found is None:
        raise SystemExit(f"Python {sys.argv[1]} is not installed")
    print(found)
