"""Logs that earlier versions wrote are read, and their figures are those that those versions reported.

data/ holds the log and the report of one job each: two nodes, a rank that is killed, a third node that comes and goes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyperpod_ext.runtime.events.event import Other
from hyperpod_ext.runtime.events.history import read_history
from hyperpod_ext.runtime.events.of_training import Restored
from hyperpod_ext.runtime.events.reading import read_events
from hyperpod_ext.runtime.events.report import make_report
from hyperpod_ext.runtime.metrics.meters import Meters
from hyperpod_ext.runtime.metrics.tracing import Recoveries

DATA = sorted((Path(__file__).parent / "data").iterdir())


@pytest.fixture(params=DATA, ids=[folder.name for folder in DATA])
def folder(request: pytest.FixtureRequest) -> Path:
    """A job's log and report; the name is the commit that wrote them."""
    return Path(request.param)


def test_a_report_of_an_earlier_log_has_the_figures_of_its_time(folder: Path) -> None:
    log = read_events(folder / "events.jsonl")
    expected = json.loads(_with_new_names((folder / "report.json").read_text()))
    known = {key: expected[key] for key in ("state", "error", "world_size")}
    found = json.loads(json.dumps(make_report(log.all_events(), **known)))
    assert [recovery.pop("failed") for recovery in found["recoveries"]] == [[1]], "was not reported then"
    assert {key: found[key] for key in expected} == expected
    assert (len(found["recoveries"]), len(found["resizes"]), found["steps"]) == (1, 2, 45)


def _with_new_names(report: str) -> str:
    for former, name in {"rung": "escalation_level", "newcomers_ready": "workers_ready"}.items():
        assert report.count(f'"{former}"') == 1
        report = report.replace(f'"{former}"', f'"{name}"')
    return report


def test_every_line_of_an_earlier_log_is_an_event_of_a_known_kind(folder: Path) -> None:
    log = read_events(folder / "events.jsonl")
    assert (log.damaged, log.notes) == (None, ())
    assert not log.events.of(Other)


def test_meters_trace_and_history_of_an_earlier_log_agree_with_its_report(folder: Path) -> None:
    events, report = read_events(folder / "events.jsonl").all_events(), json.loads((folder / "report.json").read_text())
    meters = Meters()
    for event in events:
        meters.add(event)
    assert (meters.step, meters.generation, meters.state) == (report["steps"], report["generations"], report["state"])
    assert (meters.steps_lost, meters.faults.total()) == (report["steps_lost"], len(report["faults"]))
    assert meters.recoveries == len(report["recoveries"])
    recoveries = Recoveries()
    spans = [span for event in events if (span := recoveries.add(event)) is not None]
    assert [span.attributes["hpx.cause"] for span in spans] == [fault["cause"] for fault in report["faults"]]
    history = read_history(folder)
    assert history.wall_s == pytest.approx(report["seconds"]["wall"], abs=1e-3)
    assert history.process.events + history.rehearsed == len(report["faults"])
    assert history.nodes == report["capacity"]["nodes"]


def test_a_durable_source_has_the_same_name_in_logs_of_earlier_versions(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    common = {"event": "restored", "t": 1.0, "generation": 1, "step": 4}
    events = [{**common, "rank": 0, "source": "s3"}, {**common, "rank": 1, "source": "durable", "tier": "s3"}]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert [event.came_from for event in read_events(log).events.of(Restored)] == ["s3", "s3"]
