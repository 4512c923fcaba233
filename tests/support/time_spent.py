"""Where the time of a test run went: the ten slowest tests, those that compute and that wait most, and the folders.

A pytest plugin. A test waits as long as neither its process nor a child of it that it has waited for computes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import warm

_SPENT = "time_spent"
_BEGAN = pytest.StashKey[tuple[float, float]]()
_MOST = 10
_WAITS_S = 1.0
"""Who waits less is not listed."""


def _cpu_s() -> float:
    """Of this process, and of those it has waited for or that the warm one has forked for it."""
    return sum(os.times()[:4]) + warm.Forked.cpu_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[Any]:
    item.stash[_BEGAN] = time.perf_counter(), _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "teardown" and _BEGAN in item.stash:
        wall, cpu = item.stash[_BEGAN]
        report.user_properties = [*report.user_properties, (_SPENT, [time.perf_counter() - wall, _cpu_s() - cpu])]
    return report


def table(spent: dict[str, tuple[float, float]]) -> list[str]:
    """Lines to print of seconds, wall and CPU, by test."""
    folders: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for test, (wall, cpu) in spent.items():
        folder = folders["/".join(test.partition("::")[0].split("/")[:-1][:3])]
        folder[0], folder[1], folder[2] = folder[0] + 1, folder[1] + wall, folder[2] + cpu
    lines = ["the slowest, in seconds of wall and CPU"]
    slowest = sorted(spent, key=lambda test: -spent[test][0])[:_MOST]
    lines += [f"  {spent[test][0]:7.1f} {spent[test][1]:7.1f}  {test}" for test in slowest]
    lines.append("those that compute most: seconds of CPU")
    lines += [f"  {spent[test][1]:7.1f}  {test}" for test in sorted(spent, key=lambda test: -spent[test][1])[:_MOST]]
    waits = {test: wall - cpu for test, (wall, cpu) in spent.items() if wall - cpu > _WAITS_S and test not in slowest}
    if waits:
        lines.append("of the others, those that wait most: seconds that neither they nor processes they ended computed")
        lines += [f"  {waits[test]:7.1f}  {test}" for test in sorted(waits, key=lambda test: -waits[test])[:_MOST]]
    lines.append("by folder: tests, seconds of wall and CPU")
    for name, (count, wall, cpu) in sorted(folders.items(), key=lambda one: -one[1][1]):
        lines.append(f"  {count:5.0f} {wall:8.1f} {cpu:8.1f}  {name}")
    return lines


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report for found in terminalreporter.stats.values() for report in found if hasattr(report, "user_properties")
    ]
    spent = {r.nodeid: tuple(value) for r in reports for name, value in r.user_properties if name == _SPENT}
    if len(spent) > _MOST:
        for line in table(spent):
            terminalreporter.write_line(line)
