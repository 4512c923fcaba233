"""Runs of a series, and who makes them."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import series


def test_a_series_has_twenty_runs_of_all_variants_spread_over_it() -> None:
    order = series.in_turn(series.TWENTY)
    assert len(order) == 20
    assert set(order) == set(series.VARIANTS)
    assert order[:10].count("plain") == 5
    assert "user" in order[:7]
    assert "user" in order[-7:]


def test_a_run_without_interrupts_ignores_them(tmp_path: Path) -> None:
    program = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    (tmp_path / "Makefile").write_text(f"seen:\n\t@{shlex.join([sys.executable, '-c', program])}\n")
    for name, seen in {"sigint": "True\n", "plain": "False\n"}.items():
        log = tmp_path / name
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            assert series.make(series.VARIANTS[name], tmp_path, "seen", log) == 0
        finally:
            signal.signal(signal.SIGINT, before)
        assert log.read_text() == seen


def test_a_variant_that_is_not_there_is_named() -> None:
    command = [sys.executable, series.__file__, "--runs", "plain=1", "moon=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no variants: moon; there are plain, sigint, neighbours, space, user" in done.stderr
