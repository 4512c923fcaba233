"""Environments for what does not go together with ours: both SageMaker SDKs, and moto's server.

Each is made on first use, or by name (`python tests/support/sdk_venvs.py moto`); a machine that cannot make one skips
its tests, and fails them under CI.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PINS = Path(__file__).with_name("sdk-pins.txt")
ROOT = PINS.parents[2]
VENVS = ROOT / ".venv" / "sdk"


class UnavailableError(Exception):
    """The environment cannot be made here."""


def pins() -> dict[str, str]:
    """Name of each environment, and what is in it."""
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    return {name: packages for name, _, packages in (line.partition(" ") for line in lines)}


def install(name: str) -> Path:
    """Python of the environment, which is made unless it is as the pins want it."""
    VENVS.mkdir(parents=True, exist_ok=True)
    with (VENVS / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side, and one of them makes it
        return _install(name)


def _install(name: str) -> Path:
    venv, wanted = VENVS / name, pins()[name]
    ready = venv / ".ready"
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(venv, ignore_errors=True)
        pip = [
            str(venv / "bin" / "pip"),
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            *wanted.split(),
        ]
        try:
            for command in ([sys.executable, "-m", "venv", str(venv)], pip):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise UnavailableError(f"environment {name} cannot be made: {said.strip()[-300:]}") from error
        ready.write_text(wanted)
    return venv / "bin" / "python"


def python_of(name: str) -> Path:
    """`install` for tests: skips where it cannot be, and fails under CI."""
    try:
        return install(name)
    except UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


if __name__ == "__main__":
    for environment in sys.argv[1:] or pins():
        try:
            install(environment)
        except UnavailableError as error:
            print(error, file=sys.stderr)
