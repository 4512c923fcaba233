"""A job on Slurm that is resized, or whose ranks move: what is asked of Slurm, what refused. With our own commands."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError, UnsupportedError, WaitTimeoutError
from hyperpod_ext.jobs.contract import records, resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.render import check_shell
from hyperpod_ext.jobs.contract.run_files import Tail
from hyperpod_ext.jobs.contract.targets import MOVE, RESIZE
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.slurm import move as hyperpod_slurm_move
from hyperpod_ext.jobs.slurm import resize as hyperpod_slurm_resize
from hyperpod_ext.jobs.slurm import target as hyperpod_slurm
from hyperpod_ext.jobs.slurm.script import job_script, nodes_script

HANDLE = JobHandle("hyperpod-slurm", "research", "a")
ELASTIC = {"nodes": 2, "elastic": {"min_nodes": 1, "max_nodes": 4}}


def job(**fields: Any) -> JobConfig:
    return JobConfig.model_validate_json(json.dumps({"name": "a", "script": "train.py"} | fields))


def events(*nodes: int, more: tuple[dict[str, Any], ...] = ()) -> list[dict[str, Any]]:
    started = {"event": "job_started", "nodes": len(nodes)}
    return [started, *({"event": "node_joined", "node": node} for node in nodes), *more]


def test_the_nodes_of_a_job_are_known_from_its_events() -> None:
    later = (
        {"event": "node_joined", "node": 3},
        {"event": "world", "nodes": 3},
        {"event": "node_lost", "node": 0},
        {"event": "world", "nodes": 2},
        {"event": "node_left", "node": 3},
    )
    assert resize.nodes_of_job(events(0, 1)) == resize.JobNodes(2, frozenset({0, 1}))
    assert resize.nodes_of_job(events(0, 1, more=later)) == resize.JobNodes(2, frozenset({1}))


@pytest.mark.parametrize(
    ("nodes", "spares", "size", "members", "numbers"),
    [
        (3, 0, 2, {0, 1}, (3,)),
        (4, 0, 2, {0, 1}, (2, 3)),
        (1, 0, 2, {0, 1}, ()),
        (3, 0, 2, {0, 1, 3}, ()),  # one that came before waits for work
        (3, 1, 2, {0, 1, 2}, (4,)),
        (4, 1, 2, {0, 1}, (2, 3, 4)),  # the spare that was lost, too: without it none would be free
        (2, 0, 1, {3}, (2,)),
    ],
)
def test_nodes_that_come_get_the_highest_free_numbers(
    nodes: int, spares: int, size: int, members: set[int], numbers: tuple[int, ...]
) -> None:
    spec = job(spares=spares, **ELASTIC)
    assert hyperpod_slurm_resize.numbers_for(spec, nodes, resize.JobNodes(size, frozenset(members))) == numbers


def test_nodes_that_come_are_asked_for_as_those_of_the_job_are_and_bring_the_order(tmp_path: Path) -> None:
    spec = job(**ELASTIC, scheduling={"queue": "dev"}, timeouts={"run_s": 600}, slurm={"sbatch": {"mail-type": "END"}})
    text = nodes_script(spec, "17", "001", (2, 3), '{"nodes":4,"joining":[2,3]}', tmp_path / "it's here")
    check_shell("nodes.sbatch", text)
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--job-name=a.nodes", "--array=2,3", "--nodes=1", "--partition=dev", "--time=0-00:10:00"} <= set(options)
    assert {"--no-requeue", "--signal=B:USR1@30", "--comment=hyperpod_ext:17", "--mail-type=END"} <= set(options)
    start = tmp_path / "it's here" / "hpx-runs" / "a" / "17" / "0.2"
    older = start.with_name("0.1")
    for folder in (older, start):
        folder.mkdir(parents=True)
        (folder / "events.jsonl").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {"srun": 'env >"$HPX_JOB_DIR/env"', "squeue": "echo RUNNING", "scancel": "exit 1"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "18"}
    done = subprocess.run(["sh"], input=text, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((start / "resizes" / "001.json").read_text()) == {"nodes": 4, "joining": [2, 3]}
    seen = dict(line.partition("=")[::2] for line in (start.parent / "env").read_text().splitlines())
    assert (seen["HPX_REJOIN"], seen["HPX_RUN_DIR"]) == ("3", str(start))
    assert seen["HPX_SECRET_FILE"] == str(start.parents[1] / "secret")


def test_who_hears_of_the_time_limit_depends_on_what_follows() -> None:
    def signal(**fields: Any) -> str:
        return next(
            line for line in job_script(job(timeouts={"run_s": 60}, **fields)).splitlines() if "--signal" in line
        )

    durable = {"checkpoint": {"tiers": [{"kind": "file", "path": "/fsx"}]}}
    assert signal() == "#SBATCH --signal=TERM@30"
    assert signal(**ELASTIC) == "#SBATCH --signal=B:USR1@30"
    assert signal(slurm={"requeue_at_limit": True}, **durable) == "#SBATCH --signal=B:USR1@30"
    assert signal(mode="plain") == "#SBATCH --signal=TERM@30"
    assert "scontrol requeue" not in job_script(job(mode="plain"))
    assert "scontrol requeue" not in job_script(job(slurm={"requeue": False}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"timeouts": {"run_s": 60}}, "without a durable tier"),
        ({}, "has no effect without a time limit"),
        ({"timeouts": {"run_s": 60}, "mode": "plain"}, "is not saved before the time limit"),
        (
            {"timeouts": {"run_s": 60}, "slurm": {"requeue": False, "requeue_at_limit": True}},
            "contradicts slurm.requeue: false",
        ),
    ],
)
def test_a_job_that_could_not_go_on_after_its_limit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        make_plan(job(**{"slurm": {"requeue_at_limit": True}, **fields}), target="hyperpod-slurm")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a job that runs on two nodes, and of the commands that stand for Slurm's."""
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    record = {"id": "17", "cluster": "research", "folder": str(tmp_path), "runs": "hpx-runs"}
    records.remember("hyperpod-slurm", "a", {**record, "world_size": 2, "submitted_at": "2026-11-21T10:00:00"})
    start = tmp_path / "hpx-runs" / "a" / "17" / "0.0"
    (start / "hosts").mkdir(parents=True)
    for node in (0, 1):
        (start / "hosts" / str(node)).write_text(f"n{node}\n")
    (start / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(0, 1)))
    (start.parent / "job.sbatch").write_text(job_script(job(**ELASTIC)))
    say(tmp_path, "RUNNING")
    return tmp_path


def say(folder: Path, state: str, array: str = "RUNNING", shrink: str = "exit 0") -> None:
    line = f"17|{state}|2026-11-21T10:00:00|N/A|None"
    programs = {
        "squeue": f'case "$*" in *%N*) echo "n[0-1]|n0";; *--jobs=18*) echo {array};; *) echo "{line}";; esac',
        "scontrol": f'case "$*" in *hostnames*) printf "n0\\nn1\\n";; *update*) echo "$*" >>{folder}/updates; '
        f"{shrink};; *) echo 'ClusterName = research';; esac",
        "sbatch": f"cat >{folder}/sent; echo 18",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def tell(folder: Path, *more: dict[str, Any]) -> None:
    with (folder / "hpx-runs" / "a" / "17" / "0.0" / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in more)


def order_of(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "hpx-runs" / "a" / "17" / "0.0" / "resizes").glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def resized(ordered: hyperpod_slurm_resize.PendingResize) -> dict[str, Any]:
    return {"event": "resized", "order": ordered.name, "nodes": ordered.nodes, "of": ordered.of}


def test_fewer_nodes_are_ordered_and_those_that_left_go_back(running: Path) -> None:
    ordered = hyperpod_slurm_resize.order(HANDLE, 1)
    assert (order_of(running), ordered.note) == ({"nodes": 1}, "")
    tell(running, {"event": "resize_begun", "order": ordered.name, "leaving": [1]}, resized(ordered))
    (ordered.start / "node1.left").touch()
    done = hyperpod_slurm_resize.outcome(ordered, 10)
    assert (done["nodes"], done["given_back"], done["kept"]) == (1, ["n1"], [])
    assert (running / "updates").read_text() == "update JobId=17 NodeList=n0\n"


def test_where_slurm_lets_no_job_shrink_the_nodes_stay_and_it_is_said(running: Path) -> None:
    ordered = hyperpod_slurm_resize.order(HANDLE, 1)
    tell(running, {"event": "resize_begun", "order": ordered.name, "leaving": [1]}, resized(ordered))
    (ordered.start / "node1.left").touch()
    say(running, "RUNNING", shrink="echo 'Job is no longer pending execution for job 17' >&2; exit 1")
    done = hyperpod_slurm_resize.outcome(ordered, 10)
    assert (done["given_back"], done["kept"]) == ([], ["n1"])
    assert "no longer pending" in done["why_kept"]


def test_more_nodes_are_asked_of_slurm_and_the_order_comes_with_them(running: Path) -> None:
    ordered = hyperpod_slurm_resize.order(HANDLE, 3)
    assert ordered.note == "job 18 of the queue adds 1 more node; training continues meanwhile"
    assert "#SBATCH --array=3" in (running / "sent").read_text().splitlines()
    assert not (ordered.start / "resizes").exists()
    assert hyperpod_slurm.more_jobs(ordered.job.job_dir) == ["18"]
    with pytest.raises(WaitTimeoutError, match=r"not been resized within 0\.2 s"):
        hyperpod_slurm_resize.outcome(ordered, 0.2)
    tell(running, {"event": "resized", "order": "", "nodes": 3, "of": 2})  # in place of one that was lost before
    tell(running, {"event": "resize_refused", "order": ordered.name, "nodes": 3, "why": "the job has 3 nodes already"})
    assert hyperpod_slurm_resize.outcome(ordered, 10)["nodes"] == 3

    say(running, "RUNNING", array="PENDING")
    with pytest.raises(ConflictError, match="already waits for nodes of an earlier resize, job 18"):
        hyperpod_slurm_resize.order(HANDLE, 4)


def test_nodes_that_fail_on_their_way_and_a_job_that_ends_first_are_told(running: Path) -> None:
    ordered = hyperpod_slurm_resize.order(HANDLE, 3)
    say(running, "RUNNING", array="FAILED")
    with pytest.raises(ConflictError, match=r"has failed: see .*a\.nodes-18_"):
        hyperpod_slurm_resize.outcome(ordered, 10)
    say(running, "COMPLETED")
    with pytest.raises(ConflictError, match="before it was resized"):
        hyperpod_slurm_resize.outcome(ordered, 10)


@pytest.mark.parametrize(("nodes", "words"), [(5, "above elastic.max_nodes"), (2, "already has 2 nodes")])
def test_a_number_that_cannot_be_is_refused(running: Path, nodes: int, words: str) -> None:
    with pytest.raises((ConfigError, ConflictError), match=words):
        hyperpod_slurm_resize.order(HANDLE, nodes)


def test_a_job_that_cannot_be_resized_now_is_refused(running: Path) -> None:
    job_file = running / "hpx-runs" / "a" / "17" / "job.sbatch"
    say(running, "PENDING")
    with pytest.raises(ConflictError, match="is not training"):
        hyperpod_slurm_resize.order(HANDLE, 1)
    say(running, "RUNNING")
    hosts = job_file.with_name("0.0") / "hosts"
    hosts.rename(hosts.with_name("gone"))
    with pytest.raises(UnsupportedError, match="another version"):
        hyperpod_slurm_resize.order(HANDLE, 1)
    job_file.write_text(job_script(job(mode="plain", nodes=2)))
    with pytest.raises(UnsupportedError, match="mode plain cannot be resized"):
        hyperpod_slurm_resize.order(HANDLE, 1)
    job_file.write_text("#!/bin/sh\n")
    with pytest.raises(NotFoundError, match="has no readable spec"):
        hyperpod_slurm_resize.order(HANDLE, 1)
    job_file.unlink()
    with pytest.raises(ConflictError, match="has not started yet"):
        hyperpod_slurm_resize.order(HANDLE, 1)


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
def test_targets_whose_jobs_keep_their_nodes_say_what_to_do_instead(target: str) -> None:
    with pytest.raises(UnsupportedError, match="submit the job again with other `nodes`"):
        RESIZE.of(target)
    with pytest.raises(ConfigError, match="there is no target"):
        RESIZE.of("kubeflw")


# --- the ranks of a node to a spare ---------------------------------------------------------------


@pytest.fixture
def with_spare(running: Path) -> Path:
    """The same folder, of a job that is not elastic and has a spare."""
    (running / "hpx-runs" / "a" / "17" / "job.sbatch").write_text(job_script(job(nodes=2, spares=1)))
    return running


def ranks_moved(folder: Path, ordered: hyperpod_slurm_move.PendingMove) -> None:
    begun = {"event": "resize_begun", "order": ordered.name, "leaving": [1], "joining": [2]}
    tell(folder, begun, {"event": "resized", "order": ordered.name, "nodes": 2, "of": 2})
    (ordered.start / "node1.left").touch()


@pytest.mark.parametrize("node", ["n1", "1"])
def test_the_ranks_of_a_node_move_and_slurm_is_told_to_leave_it_out(with_spare: Path, node: str) -> None:
    ordered = hyperpod_slurm_move.move(HANDLE, node)
    assert order_of(with_spare) == {"node": 1}
    ranks_moved(with_spare, ordered)
    done = hyperpod_slurm_move.moved(ordered, 10, drain=True)
    assert (done["node"], done["to"], done["drain"]) == (1, 2, "n1")
    updates = (with_spare / "updates").read_text()
    assert updates == "update NodeName=n1 State=DRAIN Reason=hp-ext move a\n", "it stays in the allocation"


def test_who_may_not_drain_nodes_has_the_ranks_moved_and_hears_it(with_spare: Path) -> None:
    ordered = hyperpod_slurm_move.move(HANDLE, "n1")
    ranks_moved(with_spare, ordered)
    say(with_spare, "RUNNING", shrink="echo 'slurm_update error: Invalid user id' >&2; exit 1")
    assert "Invalid user id" in hyperpod_slurm_move.moved(ordered, 10, drain=True)["why_no_drain"]
    say(with_spare, "RUNNING")
    (with_spare / "updates").unlink()
    again = dataclasses.replace(ordered, events=Tail(ordered.start / "events.jsonl"))
    assert hyperpod_slurm_move.moved(again, 10, drain=False)["to"] == 2
    assert not (with_spare / "updates").exists()


def test_a_node_of_an_elastic_job_goes_back(running: Path) -> None:
    ordered = hyperpod_slurm_move.move(HANDLE, "n1")
    ranks_moved(running, ordered)
    assert hyperpod_slurm_move.moved(ordered, 10, drain=True)["given_back"] == ["n1"]
    assert "update JobId=17 NodeList=n0" in (running / "updates").read_text()


def test_a_move_that_cannot_be_is_refused_with_what_would_help(with_spare: Path) -> None:
    with pytest.raises(ConfigError, match="does not run on node n7") as caught:
        hyperpod_slurm_move.move(HANDLE, "n7")
    assert caught.value.problems[0].hint == "the job's nodes are 0 (n0), 1 (n1)"
    with pytest.raises(ConfigError, match="has no node 3"):
        hyperpod_slurm_move.move(HANDLE, "3")
    ordered = hyperpod_slurm_move.move(HANDLE, "n1")
    say(with_spare, "COMPLETED")
    with pytest.raises(ConflictError, match="before the ranks moved"):
        hyperpod_slurm_move.moved(ordered, 10, drain=True)
    with pytest.raises(ConflictError, match="is not training"):
        hyperpod_slurm_move.move(HANDLE, "n1")
    job_file = with_spare / "hpx-runs" / "a" / "17" / "job.sbatch"
    job_file.write_text(job_script(job(nodes=2)))
    with pytest.raises(ConfigError, match="has no spares"):
        hyperpod_slurm_move.move(HANDLE, "n1")
    job_file.write_text(job_script(job(mode="plain", nodes=2)))
    with pytest.raises(UnsupportedError, match="cannot move in mode plain"):
        hyperpod_slurm_move.move(HANDLE, "n1")


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow", "sagemaker"])
def test_targets_whose_ranks_stay_say_what_to_do_instead(target: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot move") as caught:
        MOVE.of(target)
    assert caught.value.problems[0].hint
    with pytest.raises(ConfigError, match="there is no target"):
        MOVE.of("kubeflw")


def test_each_node_of_a_job_with_spares_says_its_name_for_the_drain() -> None:
    assert "hosts/$HPX_NODE_RANK" in job_script(job(nodes=2, spares=1))
    assert "hosts/$HPX_NODE_RANK" not in job_script(job(nodes=2))


def test_slurm_is_asked_once_though_its_answer_is_wanted_several_times_a_second() -> None:
    answers = iter(range(9))
    wanted = hyperpod_slurm_resize.seldom(lambda: next(answers))
    assert [wanted(), wanted(), wanted()] == [0, 0, 0]
