"""What strangers wrote never reaches a terminal as control sequences."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command import HP_EXT
from hyperpod_ext.cli import hp_ext
from hyperpod_ext.cli.output import columns, print_result, say
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext import terminal
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem
from hyperpod_ext.terminal import drawing, escape, escape_output, quote

EVIL = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202eEVIL\r\x7f\udcff"
SAFE = r"\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202eEVIL\r\x7f\udcff"
OURS = {"cli/output.py"}
"""Modules of the command line that may write to a terminal's own stream."""


@given(st.text())
def test_nothing_of_a_text_controls_a_terminal(text: str) -> None:
    shown = escape(text)
    assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in shown)
    assert not re.search("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert escape(shown) == shown
    shown.encode()


def test_text_of_people_is_shown_as_it_is() -> None:
    text = "Größe: 5 µm\t→ 10 %\n日本語 עברית 👩‍🔬"
    assert escape(text) == text
    assert escape(EVIL) == SAFE


@pytest.mark.parametrize(
    "value", [10**5000, "x" * 10**6, [[]] * 10**5, EVIL, b"\x1b"], ids=lambda value: type(value).__name__
)
def test_a_value_of_a_stranger_is_one_short_line(value: object) -> None:
    assert len(quote(value)) < 250
    assert escape(quote(value)) == quote(value)
    assert "\n" not in quote("a\nb")


def test_errors_say_nothing_that_controls_a_terminal() -> None:
    error = HyperpodExtError(f"it is {EVIL}", hint=EVIL)
    assert str(error) == f"it is {SAFE}\n{SAFE}"
    assert SAFE in str(ConfigError([Problem(EVIL)]))


def test_all_that_a_process_prints_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    escape_output()
    escape_output()
    print(EVIL)
    sys.stderr.writelines([EVIL])
    assert (out.getvalue(), err.getvalue()) == (f"{SAFE}\n", SAFE)
    click.echo("\x1b]0;PWNED", err=True)
    assert "\x1b" not in err.getvalue()
    assert (drawing(sys.stdout), drawing(sys.stderr)) == (out, err)
    assert not hasattr(sys.stdout, "buffer")


def test_a_cell_of_a_table_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_result([], "table", columns([("a", f"x\nstep 5  complete{EVIL}"), ("b", "c")]))
    say(EVIL)
    done = capsys.readouterr()
    assert done.out == f"a  x\\nstep 5  complete{SAFE}\nb  c\n"
    assert done.err == f"{SAFE}\n"


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_scripts_get_the_text_itself_in_ascii(capsys: pytest.CaptureFixture[str], output: str) -> None:
    print_result({"a": EVIL[:-1]}, output, "")
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert output == "yaml" or json.loads(text) == {"a": EVIL[:-1]}


def test_no_command_has_a_console_of_its_own(root: Path) -> None:
    """`rich` writes terminal sequences itself, so it gets around what escapes; `output.console` says where it may."""
    writes = re.compile(r"\b(Console\((?!file=text)|sys\.std(out|err)\.(write|buffer)|(?<![\w.])print\()")
    files = {str(file.relative_to(root)): file.read_text() for file in (root / "cli").rglob("*.py")}
    assert {name for name, text in files.items() if writes.search(text)} == OURS


def test_a_command_line_of_a_stranger_is_escaped_in_the_error_too() -> None:
    done = CliRunner().invoke(hp_ext, ["checkpoints", "list", f"/nowhere/{EVIL[:-1]}"])
    assert done.exit_code == 6
    assert "\x1b" not in done.output
    told = subprocess.run([HP_EXT, EVIL[:-1]], capture_output=True, text=True, check=False)
    assert (told.returncode, "\x1b" in told.stderr) == (2, False)


def test_a_stream_knows_what_the_stream_below_it_knows() -> None:
    stream = terminal._Escaping(io.StringIO())
    assert (stream.isatty(), stream.write("\x1b")) == (False, 1)
