"""The last step of a job is in every durable tier before the job says that it succeeded, due there or not."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from command import hp_ext
from event_log import events_in
from nodes import memory_pid
from small_disk import freezable
from waiting import until

pytestmark = [pytest.mark.slow]


def tiers_in(folder: Path, every_steps: int = 5) -> list[dict[str, Any]]:
    """Both get every fifth step only, so that the last of 13 has no snapshot by itself."""
    file = {"kind": "file", "path": str(folder), "every_steps": every_steps}
    return [{"kind": "memory", "every_steps": every_steps}, file]


def durable(folder: Path, every_steps: int = 5) -> dict[str, Any]:
    return {"checkpoint": {"tiers": tiers_in(folder, every_steps), "overlap": True}}


def newest(folder: Path, secret: Path) -> int:
    """The newest durable step, by what people ask: every byte of it is read."""
    place = str(folder / "tiny")
    listed = hp_ext("checkpoints", "list", place, "--secret-file", str(secret), "-o", "json").json
    checked = hp_ext("checkpoints", "verify", place, "--secret-file", str(secret), "-o", "json")
    assert checked.code == 0, checked.stdout + checked.stderr
    return max(one["step"] for one in listed["places"][0]["checkpoints"] if one["state"] == "complete")


def told(report: dict[str, Any]) -> list[int | None]:
    return [place["newest_step"] for place in report["durable"]]


def secret_in(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the same at every start of a job")
    return secret


def test_the_last_step_is_durable_though_nothing_is_due_and_a_job_begun_again_has_nothing_to_do(
    job: Any, tmp_path: Path
) -> None:
    secret, folder = secret_in(tmp_path), tmp_path / "durable"
    env = {"HPX_SECRET_FILE": str(secret), "HPX_TEST_STEPS": "13"}
    first = job("first", workers_per_node=1, settings=durable(folder), env=env).start()
    report = first.wait()
    assert (report["state"], report["steps"]) == ("succeeded", 13), report["error"]
    assert (newest(folder, secret), told(report), report["warnings"]) == (13, [13], [])
    events = events_in(first.folder / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds[-1] == "job_ended"
    assert kinds.index("final_save") < kinds.index("uploaded") < len(kinds) - 1

    written = sorted(path.name for path in (folder / "tiny").glob("step-*"))
    again = job("again", workers_per_node=1, settings=durable(folder), env=env).start().wait()
    assert (again["state"], again["steps"], again["warnings"]) == ("succeeded", 0, []), again["error"]
    shown = hp_ext("report", str(tmp_path / "again")).stdout
    assert "succeeded, no step after the first 13 on 2 ranks" in shown
    assert (newest(folder, secret), told(again)) == (13, [13])
    assert sorted(path.name for path in (folder / "tiny").glob("step-*")) == written


def test_a_rank_killed_in_the_middle_of_the_last_save_costs_neither_the_job_nor_the_step(
    sharded: Any, tmp_path: Path
) -> None:
    """Nobody else has its shard, so the steps since the snapshot before are made again."""
    folder, fault = tmp_path / "durable", {"what": "halfway", "rank": 1, "step": 13}
    running = sharded("job", fault, tiers=tiers_in(folder), steps=13, workers_per_node=1).start()
    report = running.wait()
    assert (report["state"], report["steps"], len(report["recoveries"])) == ("succeeded", 13, 1), report["error"]
    secret = Path(running.env["HPX_SECRET_FILE"])
    assert (newest(folder, secret), told(report), report["warnings"]) == (13, [13], [])


def test_a_cancelled_job_brings_home_a_step_that_was_due_nowhere(job: Any, tmp_path: Path) -> None:
    secret, folder = secret_in(tmp_path), tmp_path / "durable"
    env = {"HPX_SECRET_FILE": str(secret), "HPX_TEST_STEPS": "100000"}
    running = job(workers_per_node=1, settings=durable(folder, 1000_000), env=env).start()
    running.until("step", step=60)
    for agent in running.agents:
        agent.terminate()
    report = running.wait()
    assert (report["state"], report["warnings"]) == ("cancelled", []), report
    assert report["steps"] >= 60
    assert (newest(folder, secret), told(report)) == (report["steps"], [report["steps"]])


def test_a_tier_that_refuses_the_last_step_is_named_with_what_is_missing(sharded: Any, tmp_path: Path) -> None:
    """Before the last save, the memory server is forbidden to write files of more than some bytes."""
    folder, gate = tmp_path / "durable", tmp_path / "gate"
    os.mkfifo(gate)
    fault = {"what": "at the gate", "rank": 0, "step": 13}
    env = {"HPX_TEST_GATE": str(gate)}
    running = sharded("job", fault, tiers=tiers_in(folder), steps=13, nodes=1, env=env).start()
    running.until("step", step=13, rank=0)
    until(lambda: [*folder.glob("tiny/step-*/manifest.json")])
    resource.prlimit(memory_pid(running, 0), resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    os.close(os.open(gate, os.O_WRONLY))
    report = running.wait()
    assert (report["state"], running.codes()) == ("succeeded", [0]), (
        "the steps are made, and the script has its results"
    )
    before = newest(folder, Path(running.env["HPX_SECRET_FILE"]))
    assert (told(report), before < 13) == ([before], True)
    (line,) = report["warnings"]
    assert f"step 13 is not in {folder}/tiny, and the newest durable step there is {before}: node 0 left out" in line
    assert "File too large" in line
    assert f"warning: {line}" in running.logs()
    shown = hp_ext("report", str(running.folder) + "/")
    assert (shown.code, f"{before}, in {folder}/tiny" in shown.stdout) == (0, True), shown.stdout
    assert f"warning: {line}" in shown.stderr


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_tier_that_is_frozen_holds_a_job_no_longer_than_its_finish_s(job: Any, tmp_path: Path, nodes: int) -> None:
    """Processes that wait for a frozen file system cannot be ended: all others of the job end without them."""
    folder = tmp_path / "durable"
    with freezable(folder) as freeze:
        secret = secret_in(tmp_path)
        env = {"HPX_SECRET_FILE": str(secret), "HPX_TEST_HOLD": "[[1, 0, 12]]"}
        settings = {"checkpoint": {"tiers": tiers_in(folder), "finish_s": 2.0}}
        running = job(nodes=nodes, workers_per_node=1, settings=settings, env=env).start()
        running.until("step", step=11, rank=0)
        for node in range(nodes):  # a manifest that is there may not be known yet
            running.until("copying", node=node, newest_step=10)
        freeze()
        (running.folder / "let-go").touch()
        report = running.wait()  # nothing thaws it
        assert (report["state"], report["steps"], running.codes()) == ("succeeded", 12, [0] * nodes), report["error"]
        (line,) = report["warnings"]
        assert f"step 12 is not in {folder}/tiny, and the newest durable step there is 10" in line
