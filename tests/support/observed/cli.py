"""`hp-ext` in this process, in an empty folder with the examples in it, without the user's settings."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import pytest
from command import Done, call_hp_ext

from observed.pool import ROOT

_KEPT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
_TIMES = [
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\b20\d{6}-?\d{6}\b"), "TIME"),
    (re.compile(r"127\.0\.0\.1:\d+"), "SERVER"),
]


class Place:
    """A folder to run commands in, as a context."""

    def __enter__(self) -> Place:
        self._patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp(prefix="observed-")).resolve()
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        for name in list(os.environ):
            if name not in _KEPT:
                self._patch.delenv(name)
        settings = {"HOME": self.folder, "HPX_HOME": self.folder / "home", "KUBECONFIG": self.folder / "kubeconfig"}
        settings |= {"COLUMNS": "100", "NO_COLOR": "1", "TZ": "UTC", "AWS_CONFIG_FILE": "/nowhere"}
        settings |= {"AWS_EC2_METADATA_DISABLED": "true", "USER": "me"}
        for name, value in settings.items():
            self.set(name, str(value))
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._patch.undo()
        shutil.rmtree(self.folder)

    def set(self, name: str, value: str) -> None:
        """Set a variable of the environment until the end."""
        self._patch.setenv(name, value)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the folder."""
        (file := self.folder / name).write_text(text)
        return file

    def run(self, *words: str) -> Done:
        """Run a command. Times and places of this machine are removed from its output. A crash has the code -1."""
        try:
            done = call_hp_ext(*words, cwd=self.folder)
        except Exception as error:
            done = Done(-1, "", f"crashed: {error!r}")
        return Done(done.code, self.neutral(done.stdout), self.neutral(done.stderr), words)

    def neutral(self, text: str) -> str:
        """A text without times and places of this machine."""
        for place, name in ((self.folder, "FOLDER"), (ROOT, "ROOT"), (sys.executable, "PYTHON"), (sys.prefix, "VENV")):
            text = text.replace(str(place), name)
        for pattern, name in _TIMES:
            text = pattern.sub(name, text)
        return text
