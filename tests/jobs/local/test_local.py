"""Target local with real processes; shell stands in for the nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from local_place import LocalPlace
from stand_in import SLEEPING, plan_of, reporting
from stopped import stopped
from waiting import until

from hyperpod_ext.errors import ConfigError, ConflictError, JobFailedError, NotFoundError
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.jobs.local import target as local
from hyperpod_ext.jobs.submit import submit

HANDLE = JobHandle("local", "localhost", "a")


def run(script: str, **fields: object) -> JobStatus:
    """Submit, and wait for the end."""
    return list(local.watch(submit(plan_of(script, **fields))))[-1].status


def newest() -> local_store.Submission:
    found = local_store.latest("a")
    assert found is not None
    return found


def engine_pid() -> int:
    """The keeper's child; the keeper itself is in the pid file."""
    keeper = newest().pid_file.read_text().strip()
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text())


def wait_for_nodes(place: LocalPlace, count: int = 8) -> None:
    """Until two SLEEPING nodes and both engine processes are there."""
    until(lambda: len(place.processes()) >= count, lambda: str(place.processes()))


def wait_for_end() -> None:
    until(lambda: not newest().is_running())


def test_exactly_the_files_of_the_plan_are_run(place: LocalPlace) -> None:
    plan = plan_of(reporting())
    submit(plan)
    wait_for_end()
    assert newest().script.read_text() == plan.files["node.sh"]
    assert json.loads(newest().job_file.read_text())["restart"]["max_restarts"] == 10


def test_a_job_that_reports_success_has_succeeded_and_leaves_nothing(place: LocalPlace) -> None:
    moments = list(local.watch(submit(plan_of(reporting())), with_lines=True))
    status = moments[-1].status
    assert (status.state, status.step, status.of, status.error) == ("succeeded", 1, 2, None)
    events = [event for moment in moments for event in moment.events]
    assert [(event["event"], event["run"]) for event in events] == [("step", "main")]
    lines = [line for moment in moments for line in moment.lines]
    assert sorted(lines) == ["rank 0 | worker speaks", "rank 1 | worker speaks"]
    assert local.result(HANDLE)["loss_equal"] is None
    assert place.leftovers() == []


def test_nodes_are_told_who_they_are_and_share_a_private_secret(place: LocalPlace) -> None:
    script = (
        'stat -c "%a" $HPX_SECRET_FILE $HPX_SOCKET_DIR; wc -c < $HPX_SECRET_FILE\n'
        "echo $HPX_NODE_RANK $HPX_RDZV_ENDPOINT $HPX_SOURCE_DIR ${#HPX_SOCKET_DIR} ${HPX_HOME:-unset}\n" + reporting()
    )
    assert run(script).state == "succeeded"
    for node in (0, 1):
        log = (newest().run_dir("main") / "logs" / f"node{node}.log").read_text().split()
        assert log[:3] == ["600", "700", "64"]
        assert log[3] == str(node)
        assert log[4].startswith("127.0.0.1:")
        assert log[5] == "/"
        assert int(log[6]) < 80
        assert log[7] == "unset"


def test_other_users_can_read_nothing_of_a_job(place: LocalPlace) -> None:
    run(reporting())
    main = newest().run_dir("main")
    found = [newest().folder.parent, *newest().folder.parent.rglob("*")]
    theirs = {main / "report.json", main / "events.jsonl", *main.glob("logs/rank*.log")}  # the stand-in wrote them
    assert [path for path in found if path.lstat().st_mode & 0o077 and path not in theirs] == []
    assert main / "logs" in found


def test_the_undisturbed_run_has_chaos_off_and_is_compared(place: LocalPlace) -> None:
    script = "echo chaos ${HPX_CHAOS:-on}\n" + reporting()
    assert run(script, chaos={"compare": True}).state == "succeeded"
    result = local.result(HANDLE)
    assert (result["loss_equal"], result["weights_equal"]) == (True, True)
    assert result["undisturbed"] == {"steps": 2, "seconds": 2.0, "goodput": 0.5}
    logs = {run: (newest().run_dir(run) / "logs" / "node0.log").read_text() for run in ("main", "undisturbed")}
    assert logs == {"main": "chaos on\n", "undisturbed": "chaos off\n"}


def test_a_difference_is_found(place: LocalPlace) -> None:
    other = reporting(weights="abd", losses={"1": 5.5, "2": 5.250000000000001})
    run(f"if [ ${{HPX_CHAOS:-on}} = off ]; then\n{other}\nelse\n{reporting()}\nfi\n", chaos={})
    result = local.result(HANDLE)
    assert (result["loss_equal"], result["weights_equal"]) == (False, False)


def test_a_node_that_dies_without_a_report_fails_the_job_with_its_log(place: LocalPlace) -> None:
    status = run("echo what went wrong >&2; exit 3\n", chaos={"compare": True})
    assert status.state == "failed"
    assert status.error is not None
    assert "ended with exit code 3 without a report\nwhat went wrong" in status.error["message"]
    assert not newest().run_dir("undisturbed").exists()


def test_what_a_node_leaves_running_is_ended_with_it(place: LocalPlace) -> None:
    run("setsid sleep 600 &\n" + reporting())
    assert place.leftovers() == []


def test_cancel_ends_everything_and_returns_when_nothing_is_left(place: LocalPlace) -> None:
    submit(plan_of(SLEEPING))
    wait_for_nodes(place)
    status = local.cancel(HANDLE)
    assert (status.state, place.leftovers()) == ("cancelled", [])
    assert local.cancel(HANDLE).state == "cancelled"


def test_a_job_cancelled_at_once_is_cancelled(place: LocalPlace) -> None:
    submit(plan_of(SLEEPING))
    assert local.cancel(HANDLE).state == "cancelled"
    assert place.leftovers() == []


@pytest.mark.parametrize("victims", ["engine", "keeper", "both"])
def test_nothing_outlives_an_engine_that_is_killed(place: LocalPlace, victims: str) -> None:
    submit(plan_of(SLEEPING))
    wait_for_nodes(place, 8)
    pids = {"engine": [engine_pid()], "keeper": [int(newest().pid_file.read_text())]}
    pids["both"] = [*pids["keeper"], *pids["engine"]]
    with stopped(engine_pid()):  # it must not see the end of the other before its own
        for pid in pids[victims]:
            os.kill(pid, signal.SIGKILL)
    wait_for_end()
    until(lambda: local.status(HANDLE).ended)
    status = local.status(HANDLE)
    assert status.state == "failed"
    assert "engine" in (status.error or {})["message"]
    assert place.leftovers() == []
    assert local.result(HANDLE)["state"] == status.state


def test_a_name_in_use_is_refused_and_free_again_afterwards(place: LocalPlace) -> None:
    submit(plan_of(SLEEPING))
    with pytest.raises(ConflictError, match="hp-ext cancel a"):
        submit(plan_of(reporting()))
    local.cancel(HANDLE)
    assert run(reporting()).state == "succeeded"
    assert newest().folder.name == "0002"


def test_a_port_in_use_is_refused_before_anything_starts(place: LocalPlace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConflictError, match=f"port {port}"):
            submit(plan_of(reporting(), rendezvous={"port": port}))
    assert local_store.names() == []


def test_a_given_port_is_used(place: LocalPlace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run("echo $HPX_RDZV_ENDPOINT\n" + reporting(), rendezvous={"port": port})
    assert f"127.0.0.1:{port}\n" in (newest().run_dir("main") / "logs" / "node0.log").read_text()


@pytest.mark.parametrize(("module", "hint"), [("torch", "pip install torch"), ("awscrt", r"hyperpod-ext\[runtime\]")])
def test_a_missing_package_is_told_before_anything_starts(
    place: LocalPlace, monkeypatch: pytest.MonkeyPatch, module: str, hint: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(JobFailedError, match=hint):
        submit(plan_of(reporting()))


def test_all_missing_packages_are_told_at_once(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    tiers = [{"kind": "s3", "uri": "s3://bucket/prefix"}]
    with pytest.raises(JobFailedError) as caught:
        submit(plan_of(reporting(), checkpoint={"tiers": tiers}))
    assert caught.value.message == f"torch, awscrt, cryptography, boto3 are not installed in {sys.executable}"
    assert caught.value.hint == "pip install torch 'hyperpod-ext[runtime,s3]'"


def test_logs_are_merged_or_of_one_rank(place: LocalPlace) -> None:
    run("echo from the node\n" + reporting())
    assert list(local.logs(HANDLE)) == [
        *("node 0 | from the node", "node 1 | from the node"),
        *("rank 0 | worker speaks", "rank 1 | worker speaks"),
    ]
    assert list(local.logs(HANDLE, rank=1)) == ["rank 1 | worker speaks"]
    with pytest.raises(NotFoundError, match="ranks are 0 to 1"):
        local.logs(HANDLE, rank=2)


def test_logs_can_be_followed_to_the_end(place: LocalPlace) -> None:
    submit(plan_of("echo first; sleep 0.3; echo last\n" + reporting()))
    assert [line for line in local.logs(HANDLE, follow=True) if "node 0" in line] == ["node 0 | first", "node 0 | last"]


def test_an_unknown_name_suggests_the_nearest(place: LocalPlace) -> None:
    with pytest.raises(NotFoundError, match="`hp-ext list` lists all"):
        local.status(HANDLE)
    run(reporting(), name="tiny-gpt")
    with pytest.raises(NotFoundError, match="did you mean `tiny-gpt`"):
        local.status(JobHandle("local", "localhost", "tiny-gtp"))
    assert [status.name for status in local.list_jobs()] == ["tiny-gpt"]


def test_a_result_that_is_not_there_yet_says_so(place: LocalPlace) -> None:
    submit(plan_of(SLEEPING))
    with pytest.raises(NotFoundError, match="no result yet"):
        local.result(HANDLE)
    local.cancel(HANDLE)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("status.json", "", "is not JSON"),
        ("status.json", '{"name": "a", "state": 1, "submitted_at": "", "error": null}', "state: must be text"),
        (
            "status.json",
            '{"state": "failed", "name": "a", "submitted_at": "", "error": {}}',
            "error.message",
        ),
        ("job.json", "[1]", "is not a JSON object"),
        ("job.json", '{"name": "a", "script": "a.py", "nodes": "2"}', "nodes: must be a whole number"),
        ("result.json", '{"state": "succeeded", "recoveries": 1}', "recoveries: must be a list"),
    ],
)
def test_a_damaged_file_of_a_job_is_an_error_that_names_it(place: LocalPlace, file: str, text: str, told: str) -> None:
    run(reporting())
    run(reporting(), name="b")
    (newest().folder / file).write_text(text)
    read = {"status.json": local.status, "job.json": local.logs, "result.json": local.result}[file]
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {told}")):
        read(HANDLE)
    listed = {status.name: status.state for status in local.list_jobs()}
    assert listed == {"a": "unknown" if file == "status.json" else "succeeded", "b": "succeeded"}


NODES = """\
import sys
from pathlib import Path
from hyperpod_ext.jobs.local.nodes import Cancellation, GracePeriod, NodeCommand, run_nodes
after_failure_s, after_asking_s, scripts = float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
grace = GracePeriod(after_failure_s=after_failure_s, after_asking_s=after_asking_s)
nodes = [NodeCommand(("sh", "-c", script), {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1]) / f"{n}.log")
         for n, script in enumerate(scripts)]
print(run_nodes(nodes, Cancellation(), grace))
"""


@pytest.mark.parametrize(
    ("after_failure_s", "after_asking_s", "fails", "other", "codes"),
    [
        (60, 60, "exit 3", "sleep 0.1", [3, 0]),
        (0.3, 60, "exit 3", "exec sleep 600", [3, -15]),
        (
            0.3,
            0.3,
            "until [ -e traps ]; do sleep 0.02; done; exit 3",
            "trap '' TERM; : >traps; while :; do sleep 0.02; done",
            [3, -9],
        ),
    ],
)
def test_when_one_node_fails_the_others_get_time_then_a_request_then_no_choice(
    tmp_path: Path, after_failure_s: float, after_asking_s: float, fails: str, other: str, codes: list[int]
) -> None:
    command = [sys.executable, "-c", NODES, str(tmp_path), str(after_failure_s), str(after_asking_s), fails, other]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == codes


def test_a_job_whose_folder_is_removed_ends_and_an_earlier_run_can_be_cancelled(place: LocalPlace) -> None:
    run(reporting())
    submit(plan_of(SLEEPING))
    wait_for_nodes(place)
    shutil.rmtree(newest().folder)
    assert local.cancel(HANDLE).state == "succeeded"  # the earlier run, which is what is left of the name
    assert place.leftovers() == []


@pytest.mark.parametrize("removed", ["0001/main", "0001", "."])
def test_cancel_comes_back_whatever_of_a_jobs_files_was_removed_by_hand(place: LocalPlace, removed: str) -> None:
    submit(plan_of(SLEEPING))
    wait_for_nodes(place)
    shutil.rmtree(place.home / "local" / "a" / removed)
    if removed == "0001/main":
        assert local.cancel(HANDLE).state == "cancelled"
    else:  # nobody can ask for it any more: it ends by itself
        with pytest.raises(NotFoundError, match="no local job named a"):
            local.cancel(HANDLE)
    assert place.leftovers() == []
