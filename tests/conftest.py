"""Shared by all tests: golden files, and the repository's root."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing them")


@pytest.fixture
def root() -> Path:
    """Root of the repository."""
    return ROOT


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare whole text with a file of the repository; `--update-golden` rewrites it."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        wanted = path.read_text()
        difference = "".join(difflib.unified_diff(wanted.splitlines(True), text.splitlines(True), "golden", "now"))
        assert text == wanted, f"{path} differs; `pytest --update-golden` rewrites it\n{difference}"

    return compare
