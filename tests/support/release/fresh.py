"""Fresh environments without the repository and without a compiler, in which a release is tried."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from release.steps import StepFailedError, run

_COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|c89|c99|clang|clang\+\+|cpp|icx|tcc)(-[\d.]+)?")
_OF_OTHERS = re.compile(r"PYTHON|HPX|PIP_TARGET|VIRTUAL_ENV$|CC$|CXX$")


@dataclass(frozen=True, slots=True)
class Fresh:
    """A virtual environment, and an empty folder in which its commands run."""

    folder: Path
    programs: Path
    """Links to the programs on PATH except compilers."""

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self, *command: str | Path, code: int = 0) -> str:
        """Run a command of the environment; see `steps.run`."""
        environ = {name: value for name, value in os.environ.items() if not _OF_OTHERS.match(name)}
        environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        environ["PATH"] = f"{self.folder / 'bin'}:{self.programs}"
        environ["HPX_HOME"] = str(self.folder / "home")
        return run(*command, cwd=self.work, environ=environ, code=code)

    def install(self, *requirements: str | Path) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--no-compile", *requirements)

    def link(self, distribution: str) -> None:
        """Link an installed distribution of this process, and the distributions it needs, into the environment."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        for needed in _needed(distribution):
            for file in needed.files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (packages / top).exists():
                    (packages / top).symlink_to(str(needed.locate_file(top)))


def make(python: Path, folder: Path, programs: Path) -> Fresh:
    run(python, "-m", "venv", folder, cwd=folder.parent)
    fresh = Fresh(folder, programs)
    fresh.work.mkdir()
    return fresh


def without_compilers(folder: Path) -> Path:
    """Return `folder` with a link to each program on PATH that is no compiler."""
    folder.mkdir()
    for place in os.get_exec_path():
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not _COMPILERS.fullmatch(program.name) and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program)
    if compiler := shutil.which("cc", path=str(folder)) or shutil.which("gcc", path=str(folder)):
        raise StepFailedError(f"{compiler} is a compiler")
    return folder


def _needed(name: str) -> Iterator[importlib.metadata.Distribution]:
    """The distribution and all that it requires here, each once."""
    names, seen = [name], set[str]()
    while names:
        if (one := names.pop()) in seen:
            continue
        seen.add(one)
        found = importlib.metadata.distribution(one)
        yield found
        for requirement in map(Requirement, found.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
