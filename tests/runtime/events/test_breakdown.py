"""Each rank's time by phase, over time, and by recovery: from the event log to the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from made_events import entry, events_of

from hyperpod_ext.runtime.events.report import make_report

Entry = dict[str, Any]


def _step(t: float, rank: int, step: int, began: float, generation: int = 1, **fields: Any) -> Entry:
    return entry(t, "step", rank=rank, step=step, began=began, generation=generation, loss=1.0 / step, **fields)


def _killed() -> list[Entry]:
    """Rank 1 is killed at 4.5 s in step 3 and sees it at 4.75 s; both make step 3 again until 8 s."""
    return [
        entry(100.0, "job_started", world_size=2),
        *(entry(101.0, "joined", rank=rank, pid=rank) for rank in (0, 1)),
        entry(101.0, "generation", generation=1, step=0),
        *(entry(101.5, "restored", rank=rank, source="fresh") for rank in (0, 1)),
        *(entry(102.0, "begun", rank=rank, step=0, generation=1) for rank in (0, 1)),
        *(_step(103.0, rank, 1, 102.0, checkpoint_s=0.25, snapshot=1) for rank in (0, 1)),
        entry(103.5, "copying", tier="/d", node=0, newest_step=None, failed=0, skipped=0, last_error=None),
        *(_step(104.0, rank, 2, 103.0, checkpoint_s=0.75, snapshot=1) for rank in (0, 1)),
        entry(104.2, "copying", tier="/d", node=0, newest_step=1, failed=1, skipped=0, last_error="full"),
        entry(104.5, "killed", rank=1),
        entry(104.75, "fault", rank=1, node=0, step=3, cause="killed by SIGKILL (9)", died=True),
        entry(105.0, "worker_started", rank=1),
        entry(105.25, "aborted", rank=0, step=2),
        entry(105.5, "joined", rank=0, pid=0),
        entry(105.5, "joined", rank=1, pid=2),
        entry(105.75, "generation", generation=2, step=2),
        *(entry(106.0, "groups_open", rank=rank) for rank in (0, 1)),
        entry(106.5, "go", step=2),
        entry(106.5, "restored", rank=0, source="self"),
        entry(106.5, "restored", rank=1, source="memory", bytes_moved=0, bytes_local=1 << 20),
        *(entry(107.0, "begun", rank=rank, step=2, generation=2) for rank in (0, 1)),
        *(_step(108.0, rank, 3, 107.0, generation=2) for rank in (0, 1)),
        *(entry(108.0, "done", rank=rank, digest="d") for rank in (0, 1)),
        entry(110.0, "job_ended"),
    ]


def _report(events: list[Entry]) -> dict[str, Any]:
    report = make_report(events_of(events), state="succeeded", error=None, world_size=2)
    json.dumps(report, allow_nan=False)
    return report


def test_every_ranks_phases_add_up_to_the_wall_time():
    report = _report(_killed())
    assert set(report["phases"]) == {"0", "1"}
    for seconds in report["phases"].values():
        assert sum(seconds.values()) == pytest.approx(report["seconds"]["wall"])


def test_shares_over_time_are_those_of_the_phases():
    report = _report(_killed())
    over_time = report["over_time"]
    assert [sum(part) for part in zip(*over_time["shares"].values(), strict=True)] == pytest.approx(
        [1.0] * 120, rel=1e-3
    )
    for phase, shares in over_time["shares"].items():
        seconds = sum(of_rank[phase] for of_rank in report["phases"].values())
        assert 2 * over_time["part_s"] * sum(shares) == pytest.approx(seconds, abs=1e-3)


def test_a_timeline_goes_from_the_fault_to_the_first_new_step_of_every_rank():
    (recovery,) = _report(_killed())["recoveries"]
    assert (recovery["t"], recovery["seconds"]) == (4.5, 3.5)
    assert recovery["timeline"]["0"] == [
        ["detect", 0.0, 0.25],
        ["abort", 0.25, 0.5],
        ["agree", 0.75, 0.5],
        ["rebuild", 1.25, 0.25],
        ["restore", 1.5, 0.5],
        ["rebuild", 2.0, 0.5],
        ["first_step", 2.5, 1.0],
    ]
    for pieces in recovery["timeline"].values():
        assert sum(seconds for _, _, seconds in pieces) == pytest.approx(recovery["seconds"])


def test_tiers_traffic_and_snapshots_are_told():
    report = _report(_killed())
    about = {"tier": "/d", "node": 0, "newest_step": 1, "failed": 1, "skipped": 0, "last_error": "full"}
    assert report["tiers"] == [{**about, "behind": [[4.2, 1]]}]
    none = {"bytes_moved": 0, "bytes_local": 0}
    assert report["traffic"] == {
        "fresh": {"restores": 2, **none},
        "memory": {"restores": 1, "bytes_moved": 0, "bytes_local": 1 << 20},
        "self": {"restores": 1, **none},
    }
    assert report["snapshots"] == {"count": 4, "mean_s": 0.5}


def test_a_fault_that_another_rank_saw_first_is_counted_from_when_it_struck():
    events = _killed()
    at = next(index for index, event in enumerate(events) if event["event"] == "fault")
    events.insert(at, events[at] | {"t": 104.7, "rank": 0, "cause": "connection closed", "died": False})
    (recovery,) = _report(events)["recoveries"]
    assert recovery["phases"]["fault_seen"] == pytest.approx(0.2)


@pytest.mark.parametrize("count", range(len(_killed()) + 1))
def test_a_log_that_ends_anywhere_gives_a_report_without_nan(count: int):
    report = _report(_killed()[:count])
    for seconds in report["phases"].values():
        assert sum(seconds.values()) == pytest.approx(report["seconds"]["wall"])
