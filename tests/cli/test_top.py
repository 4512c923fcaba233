"""hp-ext top and dashboards: a job's numbers now, and what watches them for longer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext as hp_ext
from made_events import entry

from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.runtime.metrics.meters import Meters

EVENTS = [
    entry(0.0, "job_started", world_size=2, nodes=2),
    *(entry(0.5, "worker_started", rank=rank, node=rank) for rank in (0, 1)),
    *(entry(1.0, "joined", rank=rank) for rank in (0, 1)),
    entry(1.0, "generation", generation=1, step=0, world_size=2),
    *(entry(2.0, "begun", rank=rank, step=0, generation=1) for rank in (0, 1)),
    *(entry(4.0, "step", rank=rank, step=1, of=5, began=2.0, generation=1, loss=0.5) for rank in (0, 1)),
    entry(4.0, "copying", node=0, tier="peer", newest_step=1),
]
FAULT = entry(5.0, "fault", rank=1, node=1, step=2, cause="killed", kind="signal")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job `big`, which has just ended, wrote its events."""
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    with local_store.locked("big"):
        submission = local_store.create("big")
    submission.end({"state": "cancelled", "error": None})
    submission.run_dir("main").mkdir()
    return submission.run_dir("main")


def write(run_dir: Path, *events: dict[str, Any], end: str = "") -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + end)


def test_what_scripts_read(run_dir: Path) -> None:
    write(run_dir, *EVENTS, FAULT)
    said = hp_ext("top", "big", "--once", "-o", "json").json
    assert (said["state"], said["step"], said["of"], said["loss"], said["step_s"]) == ("cancelled", 1, 5, 0.5, 2.0)
    assert (said["faults"], said["recoveries"], said["steps_lost"]) == (1, 0, 0)
    assert said["goodput"] == 0.4  # 2 of 5 seconds, on both ranks
    assert said["tiers"] == {"peer": {"newest_step": 1}}
    assert said["ranks"][1] == {"rank": 1, "node": 1, "phase": "rebuild", "step": 1, "step_s": 2.0}


def test_what_people_read(run_dir: Path) -> None:
    write(run_dir, *EVENTS)
    assert hp_ext("top", "big").stdout == (
        "big\n"
        "state      cancelled, step 1 of 5\n"
        "ranks      2 on 2 nodes, generation 1\n"
        "loss       0.5000\n"
        "time kept  50.0 %\n\n"
        "time of all ranks: start-up 50.0 %, step 50.0 %\n\n"
        "newest copies: peer step 1\n\n"
        "RANK  NODE  DOES  STEP  SECONDS\n"
        "0     0     step  1     2.0\n"
        "1     1     step  1     2.0\n"
    )


@pytest.mark.parametrize("events", [[], EVENTS[:1]], ids=["none", "one"])
def test_hardly_any_events_and_a_line_that_is_cut_off(run_dir: Path, events: list[dict[str, Any]]) -> None:
    write(run_dir, *events, end='{"t": 9.0, "event": "st')
    done = hp_ext("top", "big", "-o", "json")
    assert (done.code, done.json["goodput"], done.json["step"], done.json["ranks"]) == (0, None, None, [])
    assert "NaN" not in done.stdout


def test_a_line_that_a_full_disk_cut_short_is_left_out(run_dir: Path) -> None:
    whole = "".join(json.dumps(event) + "\n" for event in EVENTS)
    (run_dir / "events.jsonl").write_text(whole + '{"t": 5.0, "event": "fa' + json.dumps(FAULT) + "\n" + whole[-200:])
    assert hp_ext("top", "big", "-o", "json").json["step"] == 1


def test_a_job_that_is_not_there(run_dir: Path) -> None:
    done = hp_ext("top", "bgi")
    assert (done.code, done.stderr.count("there is no local job named bgi")) == (6, 1)


def test_dashboards_are_written_once(tmp_path: Path) -> None:
    done = hp_ext("dashboards", tmp_path / "made")
    names = [Path(line).name for line in done.stdout.split()]
    assert names == ["dashboard.json", "alerts.yaml", "alerts.test.yaml", "prometheus.yaml"]
    assert json.loads((tmp_path / "made" / "dashboard.json").read_text())["title"] == "hyperpod_ext jobs"
    again = hp_ext("dashboards", tmp_path / "made")
    assert again.code == 5
    assert "dashboard.json exists already" in again.stderr


def test_dashboard_and_alerts_ask_only_for_numbers_that_there_are(root: Path) -> None:
    families = {family.name for family in Meters().families(0.0)}
    known = families | {f"{name}{suffix}" for name in families for suffix in ("_bucket", "_sum", "_count")}
    shipped = root / "templates" / "observability"
    text = (shipped / "dashboard.json").read_text() + (shipped / "alerts.yaml").read_text()
    asked = set(re.findall(r"\bhpx_[a-z_]+\b", text)) - {"hpx_job"}
    assert asked <= known
    assert len(asked) > 10
