"""hp-ext doctor --job: what a stranger asks first, from what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext as hp_ext
from hyperpod_ext.cli.checkpoints.memory import nodes_of
from hyperpod_ext.cli.reference.doctor_job import newest_of_all
from hyperpod_ext.cli.reference.next_fault import budgets_left, what_next
from made_events import entry, events_of

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.local import store
from hyperpod_ext.jobs.local.result import EMPTY_REPORT

MEMORY = {"tier": "memory", "kind": "memory", "newest_step": 41}
PEER = {"tier": "peer", "kind": "peer", "newest_step": 40}
FILE = {"tier": "/fsx", "kind": "file", "newest_step": 20}


def spec(**more: Any) -> dict[str, Any]:
    job = {"name": "a", "script": "t.py", "nodes": 2, "workers_per_node": 1, **more}
    made: dict[str, Any] = json.loads(JobConfig.model_validate_json(json.dumps(job)).model_dump_json())
    return made


def killed(t: float, rank: int, node: int, step: int, **more: Any) -> dict[str, Any]:
    given = {"cause": "killed by SIGKILL (9)", "died": True, "kind": "signal", "escalation_level": "process"}
    return entry(t, "fault", rank=rank, node=node, step=step, **{**given, **more})


def lost(t: float, node: int, ranks: tuple[int, ...] = (1,)) -> list[dict[str, Any]]:
    cause = f"node {node} is lost"
    of_ranks = [killed(t, rank, node, 9, kind="lost", cause=cause, escalation_level="node") for rank in ranks]
    return [entry(t, "node_lost", node=node, cause=cause), *of_ranks, entry(t + 1, "node_joined", node=node)]


def begun(sharing: str) -> list[dict[str, Any]]:
    return [entry(0.3, "begun", rank=rank, generation=1, sharing=sharing) for rank in (0, 1)]


STARTED = [entry(0.0, "job_started", nodes=2), *(entry(0.1, "node_joined", node=node) for node in (0, 1))]
SPARE = [entry(0.2, "node_joined", node=2)]
APART = [killed(10.0 * at, 1, 1, 100 * at) for at in range(1, 11)]


@pytest.mark.parametrize(
    ("job", "held", "events", "what", "then"),
    [
        ({}, [MEMORY, PEER, FILE], [], "a process is killed", "from step 41, which is in memory"),
        ({}, [MEMORY, PEER, FILE], [], "a node is lost", "from step 40, which is in peer"),
        ({}, [MEMORY, FILE], [], "a node is lost", "from step 20, which is in /fsx"),
        ({}, [MEMORY], [], "a node is lost", "all ranks restart from step 0, because no other node or tier has a copy"),
        ({"spares": 1}, [PEER], SPARE, "a node is lost", "a spare node takes its place"),
        ({"spares": 1}, [PEER], [], "a node is lost", "the job waits up to 30 s for another node"),
        ({"nodes": 1}, [MEMORY], [], "a node is lost", "the job ends: it has no other node"),
        ({}, [MEMORY], APART[:9], "a process is killed", "the process is replaced"),
        ({}, [MEMORY], APART, "a process is killed", "this was fault 11, and the limit is 10"),
        (
            {"restart": {"max_restarts_in_window": 3, "window_s": 60}},
            [MEMORY],
            APART[:9],
            "a process is killed",
            "this was fault 6 within 60 s, and the limit is 3",
        ),
        ({}, [MEMORY], [killed(1.0, 0, 0, 1)] * 2, "a process is killed", "the job ends: rank 0 (node 0) at step 1"),
        (
            {},
            [MEMORY],
            [killed(1.0, 0, 0, at) for at in (2, 3, 4)],
            "a process is killed",
            "on node 0 the node is replaced",
        ),
        ({}, [MEMORY], [killed(1.0, 0, 0, at, kind="stuck") for at in range(12)], "a process is killed", "is replaced"),
        ({}, [PEER], [each for at in (1.0, 5.0) for each in lost(at, 1)], "a node is lost", "the job waits up to"),
        ({}, [PEER], [each for at in (1.0, 5.0, 9.0) for each in lost(at, 1)], "a node is lost", "node loss 4"),
        ({"elastic": {"min_nodes": 1, "max_nodes": 2}}, [PEER], [], "a node is lost", "continues with fewer nodes"),
        (
            {},
            [MEMORY],
            begun("same"),
            "a node is lost",
            "another node; from the state of a live rank, because all ranks hold equal state",
        ),
        ({"nodes": 1, "spares": 1}, [MEMORY], begun("same"), "a node is lost", "all ranks restart from step 0"),
        ({"nodes": 1}, [MEMORY], begun("same"), "a process is killed", "replaced; all ranks continue from step 41"),
        (
            {},
            [PEER],
            begun("shard"),
            "a node is lost",
            "the job waits up to 30 s for another node; all ranks continue from step 40",
        ),
        ({}, [MEMORY, FILE], [], "the job is started again", "the job continues from step 20, which is in /fsx"),
        (
            {},
            [MEMORY],
            [],
            "the job is started again",
            "the job restarts from step 0, because no durable tier has a checkpoint",
        ),
    ],
)
def test_what_the_next_fault_leads_to(
    job: dict[str, Any], held: list[dict[str, Any]], events: list[dict[str, Any]], what: str, then: str
) -> None:
    log = events_of([*STARTED, *events])
    assert then in dict(what_next(spec(**job), held, True, log, now=105.0))[what]


def test_what_is_left_of_the_budgets() -> None:
    log = events_of([*STARTED, *SPARE, *lost(50.0, 1, (2, 3)), *APART[:2], killed(3.0, 0, 0, 5, kind="stuck")])
    job = spec(spares=1, restart={"max_restarts": 5, "max_restarts_in_window": 4, "window_s": 60})
    left = budgets_left(job, log, now=105.0)
    assert (left["restarts"], left["restarts_in_window"], left["node_losses"], left["spares"]) == (2, 3, 2, 1)


def test_a_step_is_held_where_every_rank_has_a_whole_snapshot_of_it() -> None:
    def one(rank: int, step: int, state: str = "sealed", replica: bool = False) -> dict[str, Any]:
        return {"rank": rank, "step": step, "state": state, "replica": replica}

    nodes = [
        {"snapshots": [one(0, 5), one(0, 6), one(1, 4, replica=True)]},
        {"snapshots": [one(1, 5, "durable"), one(1, 6, "writing"), one(0, 4, replica=True)]},
    ]
    assert newest_of_all(nodes, 2, replica=False) == 5
    assert newest_of_all(nodes, 2, replica=True) == 4
    assert newest_of_all([], 2, replica=False) is None
    pieces = [[{"step": step, "rank": rank} for step in steps] for rank, steps in ((0, (3, 6)), (1, (3,)))]
    both = [{"snapshots": [], "pieces": each} for each in pieces]
    assert newest_of_all(both, 2, replica=True, parity=True) == 3
    assert newest_of_all(both, 2, replica=True) is None


def test_a_job_that_has_ended_tells_its_last_fault_and_where_it_would_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    (tmp_path / "local" / "a").mkdir(parents=True)
    submission = store.create("a")
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "fsx"), "every_steps": 20}]
    submission.job_file.write_text(json.dumps(spec(checkpoint={"tiers": tiers})))
    error = {"code": "JobFailedError", "message": "why", "hint": "have the node looked at"}
    submission.end(EMPTY_REPORT | {"name": "a", "target": "local", "handle": "local://localhost/a", "error": error})
    events = [
        entry(1.0, "job_started", world_size=2, nodes=2),
        entry(1.5, "kept", rank=0, objects={"model": "Linear", "optimizer": "SGD"}, left_out=["Dropout"]),
        entry(1.6, "unsaved", rank=0, objects=["ema.shadow (dict)"]),
        killed(2.0, 1, 1, 3),
        entry(2.5, "awaiting_node", node=1, seconds=30.0),
        entry(3.0, "job_ended", state="failed"),
    ]
    submission.run_dir("main").mkdir()
    (submission.run_dir("main") / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    done = hp_ext("doctor", "--job", "a")
    assert done.code == 0, done.stderr
    for line in (
        "in each snapshot: model (Linear), optimizer (SGD)",
        "left out by the script (run.leave_out): Dropout",
        "changes between steps, but is in no snapshot: ema.shadow (dict)",
        "last fault, of 1: rank 1 on node 1, step 3: killed by SIGKILL (9)",
        "  tried: the process was replaced",
        "  outcome: the job failed",
        "  to do: have the node looked at",
        "if the job is started again: the job restarts from step 0, because no durable tier has a checkpoint",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert "still recovers" not in done.stdout, "it has ended"
    found = hp_ext("doctor", "--job", "a", "-o", "json").json
    assert [one["kind"] for one in found["held"]] == ["memory", "file"]
    assert (found["state"], found["error"]["message"]) == ("failed", "why")
    assert found["kept"]["objects"] == {"model": "Linear", "optimizer": "SGD"}
    assert found["last_fault"]["tried"][0] == "the process was replaced"


def test_a_tier_is_shown_by_its_place_and_by_the_clock_that_it_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    (tmp_path / "local" / "a").mkdir(parents=True)
    submission = store.create("a")
    tiers = [{"kind": "memory"}, {"kind": "disk", "path": str(tmp_path / "nvme"), "every_seconds": 60}]
    submission.job_file.write_text(json.dumps(spec(checkpoint={"tiers": tiers})))
    submission.end(EMPTY_REPORT | {"name": "a", "target": "local", "handle": "local://localhost/a", "error": None})
    submission.run_dir("main").mkdir()
    (submission.run_dir("main") / "events.jsonl").write_text(json.dumps(STARTED[0]) + "\n")
    memory, disk = hp_ext("doctor", "--job", "a", "-o", "json").json["held"]
    assert (memory["tier"], memory["every_steps"]) == ("memory", 1)
    assert (disk["tier"], disk["every_s"], "every_steps" in disk) == (f"{tmp_path}/nvme", 60.0, False)


def test_the_memory_of_nodes_that_are_there_is_asked_and_of_those_that_are_lost_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    (tmp_path / "local" / "a").mkdir(parents=True)
    submission = store.create("a")
    submission.job_file.write_text(json.dumps(spec()))
    assert nodes_of(submission) == [0, 1], "nobody has come yet"
    submission.run_dir("main").mkdir()
    events = [*STARTED, *SPARE, entry(5.0, "node_lost", node=1)]
    (submission.run_dir("main") / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert nodes_of(submission) == [0, 2]


def test_a_job_of_a_cluster_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    done = hp_ext("doctor", "--job", "hyperpod-slurm://c/a")
    assert done.code != 0
    assert "hp-ext report" in done.stderr
