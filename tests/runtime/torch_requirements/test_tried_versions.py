"""Versions that were not tried are warned of, and the table of the tried ones agrees with the pages and pins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyperpod_ext.runtime.torch_requirements.tried_versions import TRIED, warn_if_untried

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    warn_if_untried.cache_clear()


@pytest.mark.parametrize("version", ["2.5.1", "2.16.0", "2.16.0a0+git1234", "3.0"])
def test_an_untried_version_is_warned_of_once(capsys: pytest.CaptureFixture[str], version: str) -> None:
    for _ in range(2):
        warn_if_untried("torch", version)
    warned = capsys.readouterr().err
    assert warned.count(f"torch {version} was not tested; recovery was tested with torch 2.6 to 2.15.") == 1


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.9"])
def test_a_tried_version_is_not(capsys: pytest.CaptureFixture[str], version: str) -> None:
    warn_if_untried("torch", version)
    assert capsys.readouterr().err == ""


def test_rank_0_warns_for_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    warn_if_untried("transformers", "6.0.0")
    assert capsys.readouterr().err == ""


def test_the_table_has_the_versions_of_the_pages_and_pins() -> None:
    files = [ROOT / f"tests/support/{name}-pins.txt" for name in ("deepspeed", "integrations")]
    pins = dict(re.findall(r"^(\w+)==(\d+\.\d+)", "".join(file.read_text() for file in files), re.M))
    assert {name: (pins[name], pins[name]) for name in TRIED if name != "torch"} == {
        name: tried for name, tried in TRIED.items() if name != "torch"
    }
    page = (ROOT / "docs/compatibility.md").read_text()
    versions = re.findall(r"^\| (\d+\.\d+)\.\d+ \| passed", page, re.M)
    assert (versions[0], versions[-1]) == TRIED["torch"]
