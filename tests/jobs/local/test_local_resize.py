"""Orders to resize a local job, and nodes that are started and let go while it runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import WANTED
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError
from hyperpod_ext.jobs.contract import resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.local import nodes as local_nodes
from hyperpod_ext.jobs.local import resize as local_resize
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.jobs.local.nodes import Cancellation, GracePeriod, NodeCommand, Wanted, run_nodes


def job(**fields: Any) -> JobConfig:
    document = {"name": "a", "script": "train.py", "nodes": 2, "workers_per_node": 2, **fields}
    return JobConfig.model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    ("fields", "nodes", "words"),
    [
        ({}, 3, "exactly 2 nodes"),
        ({"elastic": {"min_nodes": 2, "max_nodes": 4}}, 1, "below elastic.min_nodes (2)"),
        ({"elastic": {"min_nodes": 2, "max_nodes": 4}}, 5, "above elastic.max_nodes (4)"),
        ({"elastic": {"min_nodes": 2, "max_nodes": 8, "sizes": [2, 4, 8]}}, 3, "not an allowed number of nodes"),
        (
            {"elastic": {"min_nodes": 2, "max_nodes": 4}, "global_batch_size": 16},
            3,
            "cannot be divided evenly among 6 ranks",
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_those_that_can(fields: dict[str, Any], nodes: int, words: str) -> None:
    problem = resize.refusal(job(**fields), nodes)
    assert problem is not None
    assert words in problem.message
    assert problem.hint


def test_a_number_that_can_be_is_not() -> None:
    assert resize.refusal(job(elastic={"min_nodes": 1, "max_nodes": 4}, global_batch_size=24), 3) is None


def test_a_job_that_is_not_there_or_does_not_run_is_told_as_that(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    with pytest.raises(NotFoundError, match="no local job named a"):
        local_resize.order(JobHandle("local", "localhost", "a"), 2)
    (tmp_path / "local" / "a").mkdir(parents=True)
    local_store.create("a")
    with pytest.raises(ConflictError, match="is not running"):
        local_resize.order(JobHandle("local", "localhost", "a"), 2)


@pytest.mark.parametrize(
    ("fields", "node", "words"),
    [
        ({}, 1, "has no spares that ranks could move to"),
        ({"spares": 1}, 3, "has no node 3"),
        ({"spares": 1, "elastic": {"min_nodes": 2, "max_nodes": 4}}, 5, "has no node 5"),
    ],
)
def test_a_node_whose_ranks_cannot_move_is_refused_with_what_would_help(
    fields: dict[str, Any], node: int, words: str
) -> None:
    problem = resize.refusal_to_move(job(**fields), node)
    assert problem is not None
    assert words in problem.message
    assert problem.hint
    assert resize.refusal_to_move(job(**fields | {"spares": 1}), 1) is None


def test_a_move_tells_which_node_has_the_ranks_and_that_the_other_has_ended(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    (tmp_path / "local" / "a").mkdir(parents=True)
    submission = local_store.create("a")
    submission.job_file.write_text(job(spares=1).model_dump_json())
    submission.write_status(state="running")
    # nobody runs it: what its coordinator would write is written here
    monkeypatch.setattr(type(submission), "is_running", lambda self: True)
    start = submission.run_dir("main")
    start.mkdir()
    (start / "events.jsonl").touch()
    handle = JobHandle("local", "localhost", "a")
    with pytest.raises(ConfigError, match="has no node gpu-1"):
        local_resize.move(handle, "gpu-1")
    ordered = local_resize.move(handle, "1")
    assert json.loads((start / "resizes" / f"{ordered.name}.json").read_text()) == {"node": 1}
    begun = {"event": "resize_begun", "order": ordered.name, "leaving": [1], "joining": [2]}
    made = {"event": "resized", "order": ordered.name, "nodes": 2, "of": 2}
    (start / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (begun, made)))
    (start / "node1.left").touch()
    assert local_resize.moved(ordered, 10, drain=True) == {**made, "node": 1, "to": 2}


def test_the_engine_and_the_agents_mean_the_same_file() -> None:
    assert local_nodes.WANTED == WANTED


def node(tmp_path: Path, script: str, number: int) -> NodeCommand:
    env = os.environ | {"NODE": str(number), "HERE": str(tmp_path)}
    return NodeCommand(("sh", "-c", script), env, tmp_path / f"node{number}.log")


@pytest.fixture
def cancellation() -> Any:
    yield Cancellation()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


SCRIPT = """
[ -z "$HPX_REJOIN" ] || : >"$HERE/came-$NODE"
say() { echo "{\\"nodes\\": $1}" >"$HERE/.wanted" && mv "$HERE/.wanted" "$HERE/wanted.json"; }
until_there() { while [ ! -e "$1" ]; do sleep 0.01; done; }
if [ "$NODE" = 0 ]; then
    say "[0, 1, 2]"; until_there "$HERE/came-2"
    say "[0, 2]"; : >"$HERE/leave-1"; until_there "$HERE/left-1"
    say "[0, 1, 2]"; until_there "$HERE/came-1"
    : >"$HERE/over"; exit 0
fi
[ "$NODE" = 1 ] && [ -z "$HPX_REJOIN" ] && { until_there "$HERE/leave-1"; : >"$HERE/left-1"; exit 0; }
until_there "$HERE/over"
"""


def test_nodes_that_are_wanted_are_started_and_those_that_leave_are_no_failure(
    tmp_path: Path, cancellation: Any
) -> None:
    nodes = [node(tmp_path, SCRIPT, number) for number in range(2)]
    wanted = Wanted(tmp_path / "wanted.json", tmp_path / "over", lambda number: node(tmp_path, SCRIPT, number))
    assert run_nodes(nodes, cancellation, GracePeriod(needed=1), wanted) == [0, 0, 0]
    assert (tmp_path / "came-1").exists()
    assert (tmp_path / "came-2").exists()
