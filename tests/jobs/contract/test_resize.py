"""What came of an order to resize, from the events of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hyperpod_ext.cli.job.resize import _sentence

from hyperpod_ext.config.resize import has_already
from hyperpod_ext.errors import ConflictError
from hyperpod_ext.jobs.contract.resize import came_to, nodes_of_job, outcome
from hyperpod_ext.jobs.contract.run_files import Tail


def refused(folder: Path, why: str) -> Tail:
    events = folder / "events.jsonl"
    events.write_text(json.dumps({"t": 1.0, "event": "resize_refused", "order": "a", "nodes": 2, "why": why}) + "\n")
    return Tail(events)


def test_a_job_that_has_so_many_nodes_is_as_was_ordered(tmp_path: Path) -> None:
    done = outcome("tiny", refused(tmp_path, has_already(2)), "a", lambda: "")
    assert _sentence("tiny", done) == "tiny already has 2 nodes"


def test_any_other_refusal_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="tiny was not resized: the job is over"):
        outcome("tiny", refused(tmp_path, "the job is over"), "a", lambda: "")


@pytest.mark.parametrize("wrong", ["x", None, [], {}, 1.5])
def test_an_event_with_a_wrong_field_counts_for_nothing(wrong: object) -> None:
    begun = {"event": "job_started", "nodes": 2}, {"event": "node_joined", "node": 1}
    damaged = {"event": "world", "nodes": wrong}, {"event": "node_joined", "node": wrong}
    damaged += {"event": "node_lost", "node": wrong}, {"event": "node_left"}
    assert nodes_of_job([*begun, *damaged]) == nodes_of_job(begun)
    assert came_to([{"event": "resize_begun", "order": "a", "joining": wrong}], "a") is None
