"""Runs `hp-ext` as users do: from its entry point, in a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

import warm
from hyperpod_ext.cli.outputs.base import ErrorOutput
from hyperpod_ext.cli.outputs.schemas import OUTPUTS
from pydantic import TypeAdapter

HP_EXT = str(Path(sys.executable).with_name("hp-ext"))


@dataclass(frozen=True)
class Done:
    """What a command left behind. Output under `-o json` must be as `hp-ext schema` says."""

    code: int
    stdout: str
    stderr: str

    words: tuple[str, ...] = ()
    """Arguments of the command."""

    def __post_init__(self) -> None:
        if {"-o", "--output"} & set(self.words) and "json" in self.words and self.stdout:
            check_output(self.words, self.stdout)

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON value."""
        return json.loads(self.stdout)


def check_output(words: tuple[str, ...], stdout: str) -> None:
    """Raise ValidationError unless `stdout` is as the schema of the command says, or that of errors."""
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in OUTPUTS)
    TypeAdapter(OUTPUTS[name] | ErrorOutput).validate_json(stdout, strict=True)


def hp_ext(*arguments: str | Path, cwd: Path | None = None, timeout_s: float = 250.0) -> Done:
    """Run to the end."""
    command = [HP_EXT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr, tuple(map(str, arguments)))


@dataclass(frozen=True)
class Begun:
    """A command that runs."""

    process: warm.Forked | subprocess.Popen[bytes]
    outputs: tuple[IO[bytes], IO[bytes]]
    words: tuple[str, ...] = ()

    def wait(self, timeout_s: float = 250.0) -> Done:
        """To its end."""
        code = self.process.wait(timeout_s)
        texts = []
        for output in self.outputs:
            output.seek(0)
            texts.append(output.read().decode())
            output.close()
        assert "Traceback" not in texts[1], texts[1]
        return Done(code, texts[0], texts[1], self.words)


def begin_hp_ext(*arguments: str | Path, cold: bool = False) -> Begun:
    """Start it. Unless `cold`, this process and all that a local job of it starts are forked from one with the imports
    done."""
    outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (`Begun.wait` closes them)
    words = [str(argument) for argument in arguments]
    if cold:
        return Begun(subprocess.Popen([HP_EXT, *words], stdout=outputs[0], stderr=outputs[1]), outputs, tuple(words))
    process = warm.start("warm_terminal", words, env=os.environ, log=outputs[0], errors=outputs[1])
    return Begun(process, outputs, tuple(words))


def call_hp_ext(*arguments: str | Path, cwd: Path | None = None) -> Done:
    """`hp_ext` without a new process, for tests that do not end it before its time."""
    (entry,) = entry_points(group="console_scripts", name="hp-ext")
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["hp-ext", *map(str, arguments)]
    code: Any = 0
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr), chdir(cwd or Path.cwd()):
            entry.load()()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    return Done(int(code or 0), stdout.getvalue(), stderr.getvalue(), tuple(map(str, arguments)))
