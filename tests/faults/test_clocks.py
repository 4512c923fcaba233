"""Two machines whose clocks count from different starts: the log, and what follows from it, has one time."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from made_events import events_of

from hyperpod_ext.runtime.events.phases import spans

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

OTHER = ["unshare", "--time", "--monotonic", "100000"]
"""A machine that has run for a day longer."""


@pytest.fixture(scope="module", autouse=True)
def _time_namespaces() -> None:
    if subprocess.run([*OTHER, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("time namespaces need root and Linux 5.6")


def test_a_node_whose_clock_is_a_day_ahead_makes_no_second_too_many(job: Any) -> None:
    run = job(fault={"what": "after optimizer", "rank": 3, "step": 6}, elsewhere={1: OTHER}).start()
    report = run.wait()
    assert (report["state"], len(report["recoveries"])) == ("succeeded", 1)
    assert 0.0 < report["seconds"]["wall"] < 120.0
    assert 0.0 < report["recoveries"][0]["seconds"] < 60.0
    events = list(run.events())
    whole = [sum(span.seconds for span in own) for own in spans(events_of(events)).values()]
    assert whole == pytest.approx([report["seconds"]["wall"]] * 4, rel=0.005)
    steps = [(event["rank"], event["t"] - event["began"]) for event in events if event["event"] == "step"]
    assert {rank for rank, _ in steps} == {0, 1, 2, 3}
    assert all(0.0 < took < 60.0 for _, took in steps)
