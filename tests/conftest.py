"""Shared by all tests: golden files, and the repository's root."""

from __future__ import annotations

import contextlib
import difflib
import gc
import os
import re
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import whole_run
from local_place import LocalPlace

pytest_plugins = ["time_spent", "hang_stacks"]
# the same examples every time: what fails has been broken by a change. `make test-thorough` looks for new ones
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests a longer limit, and run them first: at the end of a run, they would leave other workers idle.
    With HPX_TEST_PART=2/3, keep the second of three parts of the tests."""
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    items.sort(key=lambda item: not item.get_closest_marker("timeout"))
    if part := os.environ.get("HPX_TEST_PART"):
        if not (found := re.fullmatch(r"(\d+)/(\d+)", part)) or not 1 <= int(found[1]) <= int(found[2]):
            raise pytest.UsageError(f"HPX_TEST_PART is `{part}`; write a part such as 2/3, the second of three")
        number, parts = int(found[1]), int(found[2])
        items[:] = [each for each in items if zlib.crc32(each.nodeid.encode()) % parts == number - 1]


def pytest_configure(config: pytest.Config) -> None:
    whole_run.folder()  # before this process has started others, so that it is theirs, too
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as under `nohup ... &`; what tests start would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Thousands of tests are collected, and stay: the collector need not look at them, now or in any test.

    It took 5 of the 12 CPU seconds of each worker that collected them, and its last look at the end of a run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


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


@pytest.fixture
def golden_part(golden: Callable[[Path, str], None]) -> Callable[[str, str, str], None]:
    """As `golden`, of one part of a page: what stands between `<!-- NAME -->` and the next `<!-- end -->`."""

    def compare(page: str, name: str, text: str) -> None:
        before, begin, rest = (ROOT / page).read_text().partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"{page} has no place for {name!r}"
        golden(ROOT / page, before + begin + text + end + after)

    return compare


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlace]:
    """Local jobs of this test are kept apart, and nothing of them may be left when it ends."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as scratch:  # short, for the paths of sockets
        found = LocalPlace(home=tmp_path / "home", scratch=Path(scratch))
        monkeypatch.setenv("HPX_HOME", str(found.home))
        monkeypatch.setenv("TMPDIR", scratch)
        yield found
        for pid in (left := found.lasting()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, "the test left processes"
