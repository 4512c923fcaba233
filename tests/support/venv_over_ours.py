"""Environments of pinned packages on top of ours: torch is not fetched again, and nothing of ours is touched."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path


class UnavailableError(Exception):
    """This machine has no such environment, and cannot get one."""


def make_venv(folder: Path, pins: Path, timeout_s: float) -> Path:
    """Make the environment anew; returns its interpreter.

    Raises:
        UnavailableError: with what pip says.
    """
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_dir())
    own = next(folder.glob("lib/python*/site-packages"))
    own.joinpath("ours.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    install += ["--ignore-installed", "--disable-pip-version-check", "--no-compile", "-r", str(pins)]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip took longer than {timeout_s:g} s") from error
    if done.returncode != 0:
        raise UnavailableError(f"{pins.name} cannot be installed: {done.stderr.strip()[-300:]}")
    return python
