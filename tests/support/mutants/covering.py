"""A pytest plugin that keeps which product lines each test executes, in its own process and in those that it starts.

Processes that end by a signal keep nothing. `in_children/sitecustomize.py` starts this in processes of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from mutants.drawn import PRODUCT
from mutants.table import ROOT

FOLDER = "HPX_COVERED"
"""Variable with the folder that the results go to."""


def _recorder(file: Path | None) -> coverage.Coverage:
    inside = [f"{ROOT / folder}/*" for folder in PRODUCT]
    return coverage.Coverage(data_file=file, data_suffix=True, include=inside, config_file=False, messages=False)


class Covering:
    """Records lines with the test as their context, and outcome and seconds of each test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recorder = _recorder(folder / "lines")
        self._recorder.start()
        self._seconds: dict[str, float] = defaultdict(float)
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._recorder.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._recorder.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._recorder.stop()
        self._recorder.save()
        tests = {test: self._seconds[test] for test in sorted(self._passed - self._failed)}
        (self._folder / f"tests-{os.getpid()}.json").write_text(json.dumps(tests))


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if (folder := os.environ.get(FOLDER)) and not starts_workers:
        config.pluginmanager.register(Covering(Path(folder)))


def record_child() -> None:
    """Record lines of this process, which a test has started, and of those forked from it."""
    recorder = _recorder(None)
    recorder.start()
    end = os._exit

    def keep() -> None:
        recorder.stop()
        data = recorder.get_data()
        found = {file: sorted(data.lines(file) or ()) for file in data.measured_files()}
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test and found:
            name = f"child-{os.getpid()}-{time.monotonic_ns()}.json"
            Path(os.environ[FOLDER], name).write_text(json.dumps({"test": test, "lines": found}))

    def keep_and_end(code: int) -> None:
        keep()
        end(code)

    atexit.register(keep)
    os._exit = keep_and_end  # type: ignore[assignment]
