"""The modules of examples/20-trainer, which import each other by their short names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules by name. Modules of other folders with these names are set aside for the test."""
    names = [file.stem for file in EXAMPLE.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(EXAMPLE)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]
