"""Behaviour that others can observe is as recorded in tests/observed/. `make observed ARGS=--write` records changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observed import __main__, names, pool, record

QUICK = ("examples", "specs", "wrong", "messages", "outputs", "options", "names")


@pytest.mark.parametrize("section", QUICK)
def test_the_quick_part_is_as_recorded(section: str) -> None:
    assert record.changed([section], fast=True) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("section", record.SECTIONS)
def test_everything_is_as_recorded(section: str) -> None:
    assert record.changed([section]) == []


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A section `made` of this test, recorded; tests change what it shows."""
    shown: dict[str, Any] = {"a": "first\nsecond\nthird", "b": [1, 2], "c": {"file": pool.Text("long")}}

    def section(fast: bool) -> Iterator[tuple[str, Any]]:
        yield from list(shown.items())[: 1 if fast else None]

    monkeypatch.setattr(record, "SECTIONS", {"made": section})
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    assert __main__.main(["--write"]) == 0
    return shown


def test_what_is_the_same_is_no_difference(made: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    assert capsys.readouterr().out == "0 differences\n"


def test_a_difference_is_shown_by_its_lines(made: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    made["a"] = "first\nother\nthird"
    del made["b"]
    assert __main__.main([]) == 1
    out = capsys.readouterr().out
    assert "made: a\n  @@ -1,3 +1,3 @@\n   first\n  -second\n  +other\n   third\n" in out
    assert "made: b\n" in out
    assert "2 differences" in out


def test_a_long_text_is_recorded_as_a_digest(made: dict[str, Any], tmp_path: Path) -> None:
    assert "long" not in (tmp_path / "made.json").read_text()
    made["c"] = {"file": pool.Text("longer")}
    (difference,) = record.changed(["made"])
    assert "#" in difference
    before, now = ({"file": text} for text in ("long", "longer"))
    assert "longer" in record.differences("made", {"c": before}, {"c": now})[0]


def test_the_quick_part_misses_no_key_that_it_shows(made: dict[str, Any]) -> None:
    made["c"] = {}
    assert record.changed(["made"], fast=True) == []
    made["a"] = "other"
    assert len(record.changed(["made"], fast=True)) == 1


def test_a_recorded_name_that_is_gone_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"hyperpod_ext.errors:Nothing": "(a)", "hyperpod_ext.nowhere": "module"}
    monkeypatch.setattr(record, "recorded", lambda _section: before)
    now = {name: value for name, value in names.names(True) if name in before}
    assert now == dict.fromkeys(before)
    assert len(record.differences("names", before, now, fast=True)) == 2
