"""Environments of the peers: made once on top of ours, so that torch is not fetched again; pins.txt says of what.

python -m checkpoint.peers      makes those that are missing or out of date
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).with_name("pins.txt")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Environment:
    python: Path
    pins: tuple[str, ...]
    failure: str = ""
    """Why it could not be made; empty when it was."""


def read_pins(text: str) -> dict[str, tuple[str, ...]]:
    """Requirements of each environment."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            found[line.strip("[] ")] = []
        elif line.strip() and not line.startswith("#"):
            found[list(found)[-1]].append(line.strip())
    return {name: tuple(pins) for name, pins in found.items()}


def environments(make: Collection[str] | None = None) -> dict[str, Environment]:
    """Every environment of pins.txt; those of `make` are made where they are missing, by default all.

    A failure is told, not raised: the peer is then reported as not installed.
    """
    pins = read_pins(PINS.read_text())
    return {name: _environment(name, each, make=make is None or name in make) for name, each in pins.items()}


def environment(name: str) -> Environment:
    """One of them, made if it is not there."""
    return _environment(name, read_pins(PINS.read_text())[name], make=True)


def _environment(name: str, pins: tuple[str, ...], *, make: bool) -> Environment:
    folder = Path(sys.prefix) / "bench" / name
    python, stamp = folder / "bin" / "python", folder / "made.json"
    wanted = json.dumps({"pins": pins, "python": sys.version})
    if stamp.exists() and stamp.read_text() == wanted:
        return Environment(python, pins)
    if not make:
        return Environment(python, pins, "not made")
    print(f"making the environment of {name}", file=sys.stderr)
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_dir())
    own = next(folder.glob("lib/python*/site-packages"))
    own.joinpath("ours.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    install += ["--ignore-installed", "--disable-pip-version-check", *pins]  # never touch what is ours
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=_TIMEOUT_S)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        failure = "" if done.returncode == 0 else (lines or ["ERROR: pip failed"])[-1].removeprefix("ERROR: ")
    except subprocess.TimeoutExpired:
        failure = f"pip took longer than {_TIMEOUT_S} s"
    if not failure:
        stamp.write_text(wanted)
    return Environment(python, pins, failure)


if __name__ == "__main__":
    broken = {name: each.failure for name, each in environments().items() if each.failure}
    for name, failure in broken.items():
        print(f"{name}: {failure}", file=sys.stderr)
