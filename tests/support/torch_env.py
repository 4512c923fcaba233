"""Environments with other versions of torch, one a version below .venv-torch/, with what a job needs and pytest.

`python tests/support/torch_env.py 2.15.0` makes one and prints its Python; the standard library is enough for it. It
has what `pip install torch` brings, but for two packages that torch does without where there is no GPU. The rest of
CUDA has to be there: torch's own libraries are linked against it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-torch"
GPU_ONLY = ("triton", "cuda-bindings")
"""A gigabyte, which torch imports to compile for a GPU."""
PACKAGES = (
    "-e",
    f"{ROOT}[runtime]",
    "packaging",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
)
REQUIREMENTS = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for needed in map(Requirement, importlib.metadata.requires("torch")):
    if needed.name not in sys.argv[1:] and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
"""
VERSION = "import importlib.metadata; print(importlib.metadata.version('torch').partition('+')[0])"


def install(version: str) -> Path:
    """Python of the environment, of which only what has changed is made again.

    Raises:
        subprocess.CalledProcessError: pip has said why on stderr.
    """
    folder = HOME / version
    python, torch_is_there, packages_are_there = folder / "bin" / "python", folder / ".torch", folder / ".packages"
    made_with = f"{sys.version}\nwithout {GPU_ONLY}\n"
    if _read(torch_is_there) != made_with:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = f"{PACKAGES}\n{(ROOT / 'pyproject.toml').read_text()}"
    if _read(packages_are_there) != wanted:
        _pip(python, *PACKAGES)
        packages_are_there.write_text(wanted)
    if _read(torch_is_there) != made_with:
        _pip(python, "--no-deps", f"torch=={version}")
        _pip(python, *_output(python, REQUIREMENTS, *GPU_ONLY).splitlines())
        torch_is_there.write_text(made_with)
    found = _output(python, VERSION)
    if found != version:
        raise SystemExit(f"torch {found} is in {folder}, not {version}; delete that folder")
    return python


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _pip(python: Path, *arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]  # GPU_ONLY is missing
    quiet += ["--no-compile"]  # few of torch's 3,000 modules are imported
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *arguments], check=True, stdout=sys.stderr)


def _output(python: Path, code: str, *arguments: str) -> str:
    command = [str(python), "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    print(install(sys.argv[1].removeprefix("torch==")))
