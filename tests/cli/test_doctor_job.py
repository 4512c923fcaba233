"""hp-ext doctor --job: what a stranger asks first, from what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext as hp_ext
from hyperpod_ext.cli.reference.doctor_job import newest_of_all, what_next
from made_events import entry

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.submit.local import store

MEMORY = {"tier": "memory", "kind": "memory", "newest_step": 41}
PEER = {"tier": "peer", "kind": "peer", "newest_step": 40}
FILE = {"tier": "/fsx", "kind": "file", "newest_step": 20}


def spec(**more: Any) -> dict[str, Any]:
    job = {"name": "a", "script": "t.py", "nodes": 2, "workers_per_node": 1, **more}
    made: dict[str, Any] = json.loads(JobConfig.model_validate_json(json.dumps(job)).model_dump_json())
    return made


@pytest.mark.parametrize(
    ("job", "held", "faults", "what", "then"),
    [
        ({}, [MEMORY, PEER, FILE], 0, "a process is killed", "from step 41, which is in memory"),
        ({}, [MEMORY, PEER, FILE], 0, "a node is lost", "from step 40, which is in peer"),
        ({}, [MEMORY, FILE], 0, "a node is lost", "from step 20, which is in /fsx"),
        ({}, [MEMORY], 0, "a node is lost", "they begin anew: no other node or tier has a copy"),
        ({"spares": 1}, [PEER], 0, "a node is lost", "a spare node takes its place"),
        ({"nodes": 1}, [MEMORY], 0, "a node is lost", "the job ends: it has no other node"),
        ({}, [MEMORY], 10, "a process is killed", "the job ends: 10 faults, and restart.max_restarts is 10"),
        ({}, [MEMORY, FILE], 0, "the job is started again", "it goes on from step 20, which is in /fsx"),
        ({}, [MEMORY], 0, "the job is started again", "it begins anew: no durable tier has a checkpoint"),
    ],
)
def test_what_the_next_fault_leads_to(
    job: dict[str, Any], held: list[dict[str, Any]], faults: int, what: str, then: str
) -> None:
    assert then in dict(what_next(spec(**job), held, True, faults, 0))[what]


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


def test_a_job_that_has_ended_tells_its_last_fault_and_where_it_would_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    (tmp_path / "local" / "a").mkdir(parents=True)
    submission = store.create("a")
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "fsx"), "every_steps": 20}]
    submission.job_file.write_text(json.dumps(spec(checkpoint={"tiers": tiers})))
    submission.write_status(state="failed", error={"code": "JobFailedError", "message": "why", "hint": ""})
    events = [
        entry(1.0, "job_started", world_size=2, nodes=2),
        entry(2.0, "fault", rank=1, node=1, step=3, cause="killed by SIGKILL (9)", died=True, kind="signal"),
        entry(3.0, "job_ended", state="failed"),
    ]
    submission.run_dir("main").mkdir()
    (submission.run_dir("main") / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    done = hp_ext("doctor", "--job", "a")
    assert done.code == 0, done.stderr
    assert "last fault, of 1: rank 1 on node 1, step 3: killed by SIGKILL (9)" in done.stdout
    assert "if it is started again: it begins anew: no durable tier has a checkpoint" in done.stdout
    found = hp_ext("doctor", "--job", "a", "-o", "json").json
    assert [one["kind"] for one in found["held"]] == ["memory", "file"]
    assert (found["state"], found["error"]["message"]) == ("failed", "why")


def test_a_job_of_a_cluster_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    done = hp_ext("doctor", "--job", "hyperpod-slurm://c/a")
    assert done.code != 0
    assert "hp-ext report" in done.stderr
