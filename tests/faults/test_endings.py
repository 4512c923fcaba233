"""Every way in which a script can end a rank leads to what docs/faults.md says: its table is what is tested here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


class Ending(NamedTuple):
    """One row of the table."""

    code: str
    where: str
    ends_at: int
    """The how manieth in a row ends the job."""
    exit_code: int
    last_word: str


def endings() -> list[Ending]:
    table = PAGE.read_text().partition("<!-- endings of a rank -->")[2].partition("<!-- end -->")[0]
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line
    ]
    ordinals = {"first": 1, "second": 2, "third": 3}
    return [Ending(code, where, ordinals[at], int(exit_code), word) for code, where, at, exit_code, word in rows]


def each(endings: list[Ending]) -> pytest.MarkDecorator:
    """A test for each of them; most are thorough."""
    marks = [[] if ending.code == "os._exit(3)" else [pytest.mark.thorough] for ending in endings]
    named = [(ending, f"{ending.where}: {ending.code}") for ending in endings]
    params = [pytest.param(one, id=name, marks=more) for (one, name), more in zip(named, marks, strict=True)]
    return pytest.mark.parametrize("ending", params)


ENDINGS = endings()


@each(ENDINGS)
def test_an_ending_that_comes_each_time_ends_the_job_as_the_page_says(job: Any, ending: Ending) -> None:
    fault = {"what": "code", "code": ending.code, "where": ending.where, "rank": 1, "step": 5, "always": True}
    running = job(nodes=1, workers_per_node=2, fault=fault).start()
    report = running.wait()
    assert report["state"] == "failed"
    assert ending.last_word in report["error"]["message"], report["error"]
    assert re.match("rank 1 ", report["error"]["message"]), report["error"]
    faults = [fault for fault in report["faults"] if fault["kind"] != "connection"]
    assert max(len(faults), 1) == ending.ends_at, report["faults"]
    assert running.codes() == [ending.exit_code]


AGAIN = [ending for ending in ENDINGS if ending.ends_at > 1]


@each(AGAIN)
def test_an_ending_that_comes_once_leaves_no_trace_in_the_result(job: Any, undisturbed: Any, ending: Ending) -> None:
    fault = {"what": "code", "code": ending.code, "where": ending.where, "rank": 1, "step": 5}
    report = job(fault=fault).start().wait()
    assert (report["state"], report["steps_lost"]) == ("succeeded", 0), report["error"]
    for part in ("losses", "weights", "metrics"):
        assert report[part] == undisturbed[part], part
