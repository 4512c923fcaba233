"""Several nodes, played by one machine; several runs of one job; and the end of a memory server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dcp_job import Job
from waiting import PATIENCE_S, until

PEERS = {"tiers": [{"kind": "memory"}, {"kind": "peer", "every_steps": 1}]}


def test_a_lost_node_loads_from_the_memory_of_the_other(job: Job) -> None:
    digests = job.run("save", 4, nodes=2, kind="fsdp", steps=[1, 2], policy=PEERS, wait_for_upload=True)[0]
    assert len(job.servers()) == 2
    job.lose_memory(node=1)
    for loaded in job.run("load", 4, nodes=2, kind="fsdp", policy=PEERS):
        assert loaded == {"latest": 2, "step": 2, "digest": digests["2"]}


def test_another_number_of_ranks_loads_across_nodes(job: Job) -> None:
    digests = job.run("save", 4, nodes=2, kind="fsdp", steps=[1, 2], policy=PEERS, wait_for_upload=True)[0]
    for loaded in job.run("load", 2, nodes=2, kind="fsdp", policy=PEERS):
        assert loaded == {"latest": 2, "step": 2, "digest": digests["2"]}


def test_two_trainings_of_one_name_are_told_apart(job: Job) -> None:
    running = job.start("save_and_hang", 1, marker=str(job.directory))
    until((job.directory / "0").exists)
    (text,) = job.run("quick_error", 1)
    running.kill()
    assert "also saves snapshots as job j" in text


def test_another_policy_than_the_server_has_is_refused(job: Job) -> None:
    job.run("save", 1, kind="plain", steps=[1])
    (text,) = job.run("load_error", 1, kind="plain", policy=PEERS)
    assert "runs with another checkpoint policy" in text
    assert f"kill {job.servers()[0]}" in text


def test_the_memory_server_ends_when_it_has_brought_all_that_is_due(job: Job) -> None:
    tiers = [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]
    policy = {"tiers": tiers, "when_busy": "wait"}  # else the second save may supersede the upload of the first
    job.run("save_and_leave", 2, policy=policy, idle_exit_s=0.3)
    deadline = time.monotonic() + PATIENCE_S
    while job.servers() and time.monotonic() < deadline:
        time.sleep(0.5)  # each look is a connection, too
    assert not job.servers()
    assert len(list((job.directory / "f" / "j").glob("step-*/manifest.json"))) == 2
    assert job.run("load", 2, kind="plain", policy=policy)[0]["latest"] == 2


def test_a_memory_server_whose_folder_is_removed_ends(tmp_path: Path) -> None:
    """As that of a job whose temporary folder was cleaned up: nobody could find it to end it."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of a job")
    runtime = '{"name": "j", "nodes": 1, "workers_per_node": 1}'
    lock = tmp_path / "gone" / "j.lock"
    server = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server"]
    command = [*server, "--lock", str(lock), "--idle-exit-s", "0.2"]
    server = subprocess.Popen(
        [*command, "--socket", str(tmp_path / "j.socket")],
        env={**os.environ, "HPX_RUNTIME": runtime, "HPX_SECRET_FILE": str(secret)},
    )
    try:
        assert server.wait(20) == 0
    finally:
        server.kill()


def test_ranks_that_are_no_more_give_their_memory_back(job: Job) -> None:
    job.run("save", 4, kind="fsdp", steps=[1, 2])
    job.run("save", 2, kind="fsdp", steps=[3], start_from_newest=True)
    assert job.run("held", 1) == [[0, 1, 2, 3]]  # only one save is their own yet
    job.run("save", 2, kind="fsdp", steps=[4, 5], start_from_newest=True)
    assert job.run("held", 1) == [[0, 1]]


def test_a_run_that_loads_nothing_begins_a_new_history(job: Job) -> None:
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    job.run("save", 2, kind="plain", steps=[5, 6], policy=policy, wait_for_upload=True)
    digest = job.run("save", 2, kind="plain", steps=[1], policy=policy, wait_for_upload=True)[0]["1"]
    loaded = {"latest": 1, "step": 1, "digest": digest}
    assert job.run("load", 2, kind="plain", policy=policy) == [loaded] * 2
    job.lose_memory()
    assert job.run("load", 2, kind="plain", policy=policy) == [loaded] * 2
