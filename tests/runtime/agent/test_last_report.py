"""What an agent leaves in the run's folder when it must stop: why, with its node, and the steps that were made."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from made_events import entry

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.agent.__main__ import _report
from hyperpod_ext.runtime.agent.coordinator_client import ExcludedError
from hyperpod_ext.runtime.events.log import REPORT, report_of

GONE = JobFailedError("the memory server of this node is gone", hint="look")


def left_by(run_dir: Path, node: int, error: HyperpodExtError = GONE) -> dict[str, dict[str, object]]:
    """The reports that a node leaves, by the names of their files."""
    arguments = argparse.Namespace(node_rank=node, nnodes=2, nproc_per_node=1, rejoin=False)
    _report(error, arguments, run_dir)
    return {file.name: json.loads(file.read_text()) for file in run_dir.glob("report*")}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    steps = [entry(float(step), "step", rank=rank, step=step, of=5) for step in (1, 2) for rank in (0, 1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    return tmp_path


def test_every_node_says_why_it_had_to_stop_and_how_far_the_job_had_come(run_dir: Path) -> None:
    found = left_by(run_dir, node=1)
    assert list(found) == [report_of(1)]
    assert found[report_of(1)]["steps"] == 2
    assert found[report_of(1)]["error"]["message"] == f"node 1: {GONE.message}"  # type: ignore[index]


def test_the_first_node_leaves_the_steps_that_were_made_in_the_report_of_the_job(run_dir: Path) -> None:
    found = left_by(run_dir, node=0)
    assert found.keys() == {REPORT, report_of(0)}
    assert found[REPORT] == found[report_of(0)]
    assert found[REPORT]["steps"] == 2


def test_a_node_that_names_itself_is_not_named_twice_and_speaks_for_nobody_else(run_dir: Path) -> None:
    found = left_by(run_dir, 0, ExcludedError("node 0 stops: it reaches no majority"))
    assert list(found) == [report_of(0)]
    assert found[report_of(0)]["error"]["message"] == "node 0 stops: it reaches no majority"  # type: ignore[index]


def test_before_the_job_has_begun_the_first_node_speaks_for_it(tmp_path: Path) -> None:
    found = left_by(tmp_path, node=0)
    assert list(found) == [REPORT]
    assert left_by(tmp_path, node=1) == found
