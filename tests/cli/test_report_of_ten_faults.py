"""A real job with ten faults: each rank's phases add up, agree with its steps, and the page shows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import browser
import pytest
import yaml
from command import hp_ext
from local_place import LocalPlace
from report_figures import check_figures

STEPS = 66
KILLS = [{"kind": "kill", "rank": rank, "step": step} for rank, step in ((2, 6), (0, 18), (3, 30), (1, 42), (2, 54))]
OTHERS = [
    {"kind": "exception", "rank": 1, "step": 12, "phase": "backward"},
    {"kind": "sigsegv", "rank": 3, "step": 24},
    {"kind": "exception", "rank": 0, "step": 36, "phase": "forward"},
    {"kind": "oom", "rank": 1, "step": 48},
    {"kind": "exception", "rank": 2, "step": 60, "phase": "optimizer"},
]


@pytest.mark.slow
@pytest.mark.thorough
def test_phases_of_a_run_with_ten_faults_add_up_and_are_shown(place: LocalPlace, root: Path, tmp_path: Path) -> None:
    spec = _spec(root, tmp_path)
    done = hp_ext("create-job", "-f", spec, "--wait", "-o", "json")
    assert done.code == 0, done.stderr
    folder = place.home / "local" / "tiny-gpt" / "0001" / "main"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    page = tmp_path / "page.html"
    result = hp_ext("report", "tiny-gpt", "-o", "json", "--page", page).json
    assert len(result["recoveries"]) == 10
    _check_phases(result, events)
    _check_timelines(result)
    if shutil.which("chromium") is not None:
        opened = browser.open_page(page)
        assert opened.console == []
        check_figures(opened.data(), result)


def _check_phases(result: dict[str, Any], events: list[dict[str, Any]]) -> None:
    wall = events[-1]["t"] - events[0]["t"]
    assert set(result["phases"]) == {"0", "1", "2", "3"}
    for rank, phases in result["phases"].items():
        assert sum(phases.values()) == pytest.approx(wall, rel=0.005)
        own = [e for e in events if e["event"] == "step" and e["rank"] == int(rank)]
        last = {e["step"]: e for e in own}  # of a step made twice, the last making
        # what the loop does between two steps is told as part of the steps
        kept = sum(e["t"] - e["began"] for e in last.values())
        told = sum(phases[phase] for phase in ("step", "data", "checkpoint", "first_step"))
        assert told == pytest.approx(kept, rel=0.25)
        for phase in ("startup", "detect", "agree", "rebuild", "restore", "first_step", "lost_work"):
            assert phases[phase] > 0, f"rank {rank} has no {phase}"
        assert phases["idle"] < 0.2 * wall
    assert sum(len(e["phases"]) > 0 for e in result["recoveries"]) == 10


def _check_timelines(result: dict[str, Any]) -> None:
    for recovery in result["recoveries"]:
        for rank, pieces in recovery["timeline"].items():
            took = sum(seconds for _, _, seconds in pieces)
            assert took == pytest.approx(recovery["seconds"], rel=0.02, abs=0.002), f"rank {rank}: {recovery}"


def _spec(root: Path, folder: Path) -> Path:
    for name in ("job.yaml", "train.py"):
        shutil.copy(root / "examples" / "01-local" / name, folder)
    spec = folder / "job.yaml"
    job = yaml.safe_load(spec.read_text())
    job["args"] = ["--steps", str(STEPS), "--width", "16", "--layers", "1"]
    job["chaos"] = {"faults": KILLS, "inject": OTHERS, "compare": False}
    spec.write_text(yaml.safe_dump(job))
    return spec
