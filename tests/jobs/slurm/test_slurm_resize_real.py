"""Nodes come to a job on a real Slurm and leave it; its time limit comes near; others need its nodes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
from resizing import ELASTIC
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_place import URL, Place, agents_in, done, durable_step, made_step, report
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

STEPS = 150
PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=hpx[1-4] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=hpx[1-4] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="hpx-slurm-") as place,
        slurm_cluster(Path(place), 4, PREEMPTION) as running,
    ):
        yield running


@pytest.fixture
def place(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Place]:
    # the job must outlast the start of new nodes, which took half a minute on a busy machine
    pace = {"HPX_TEST_STEPS": str(STEPS), "HPX_TEST_SECONDS": "0.3", "HPX_TEST_SLOW_FROM": "60"}
    paced = f"import os\nos.environ |= {pace}\n"
    (tmp_path / "train.py").write_text(paced + ELASTIC.read_text())
    yield Place(cluster, tmp_path)
    with suppress(CalledProcessError):
        cluster.ask("scancel", "--me")
    until(lambda: not cluster.ask("squeue", "-h", "--me").strip())


def begun(place: Place, **more: Any) -> str:
    """Id of a job that has made a few steps."""
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(place.folder / "kept"), "every_steps": 1000}]
    place.write_job(args=[], global_batch_size=24, checkpoint={"tiers": tiers}, **more)
    created = place.create()
    assert created.code == 0, created.stderr
    job = place.cluster.ask("squeue", "-h", "--me", "-o", "%i").strip()

    def has_begun() -> bool:
        return made_step(place.start_dir(job) / "events.jsonl", 5)

    until(lambda: has_begun() or not place.cluster.ask("squeue", "-h", "--me").strip())
    said = [*place.folder.glob("*.out"), *place.start_dir(job).glob("logs/node*.log")]
    assert has_begun(), "".join(f"\n{file.name}: {file.read_text()}" for file in said)
    return job


def hurry(place: Place, job: str, start: str) -> None:
    until(lambda: (place.start_dir(job, start) / "events.jsonl").exists())
    (place.start_dir(job, start) / "hurry").touch()


def ended(place: Place) -> dict[str, Any]:
    waited = done(place.start("wait", URL, "-o", "json"), 200)
    assert (waited.code, waited.json["state"], waited.json["steps"]) == (0, "succeeded", STEPS), waited.stderr
    found: dict[str, Any] = waited.json
    return found


@pytest.fixture(scope="module")
def losses(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a job of two nodes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(f'import os\nos.environ["HPX_TEST_STEPS"] = "{STEPS}"\n' + ELASTIC.read_text())
    whole = Place(cluster, folder)
    job = begun(whole)
    hurry(whole, job, "0.0")
    found: dict[str, float] = ended(whole)["losses"]
    assert len(found) == STEPS
    return found


def test_nodes_come_from_another_allocation_and_go_back_to_slurm(place: Place, losses: dict[str, float]) -> None:
    job = begun(place, elastic={"min_nodes": 1, "max_nodes": 3})
    grown = place.hp_ext("resize", URL, "--nodes", "3", "-o", "json")
    assert (grown.code, grown.json["of"], grown.json["nodes"], grown.json["pids_kept"]) == (0, 2, 3, True), grown.stderr
    assert "of the queue adds 1 more node" in grown.stderr
    assert place.hp_ext("resize", URL, "--nodes", "4").code == 3
    assert place.cluster.ask("squeue", "-h", "-n", "tiny-gpt.nodes", "-o", "%T %N").split() == ["RUNNING", "hpx3"]

    shrunk = place.hp_ext("resize", URL, "--nodes", "1", "-o", "json")
    assert (shrunk.code, shrunk.json["nodes"], shrunk.json["given_back"]) == (0, 1, ["hpx2"]), shrunk.stderr
    assert shrunk.json["kept"] == []
    assert place.cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "hpx1"
    until(lambda: place.cluster.ask("sinfo", "-h", "-p", "dev", "-t", "idle", "-o", "%D").strip() == "3")

    hurry(place, job, "0.0")
    whole = ended(place)
    assert (whole["starts"], whole["steps_lost"], whole["recoveries"]) == (1, 0, [])
    assert [(one["of"], one["nodes"]) for one in whole["resizes"]] == [(2, 3), (3, 1)]
    assert whole["losses"] == pytest.approx(losses, rel=2e-3, abs=1e-4)


def test_the_ranks_of_a_node_move_to_a_spare_and_slurm_starts_nothing_more_there(
    place: Place, losses: dict[str, float]
) -> None:
    job = begun(place, spares=1)
    moved = place.hp_ext("move", URL, "--node", "hpx2", "-o", "json")
    assert moved.code == 0, moved.stderr
    assert (moved.json["node"], moved.json["to"], moved.json["drain"]) == (1, 2, "hpx2")
    try:
        assert place.cluster.ask("sinfo", "-h", "-n", "hpx2", "-p", "dev", "-o", "%T %E").split(None, 1) == [
            "draining",
            "hp-ext move tiny-gpt\n",
        ]
        assert place.cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "hpx[1-3]"
        refused = place.hp_ext("move", URL, "--node", "hpx1")
        assert (refused.code, "no spare" in refused.stderr) == (5, True), refused.stderr
        hurry(place, job, "0.0")
        whole = ended(place)
    finally:
        place.cluster.ask("scontrol", "update", "NodeName=hpx2", "State=RESUME")
    assert (whole["starts"], whole["steps_lost"], whole["recoveries"], whole["nodes_lost"]) == (1, 0, [], [])
    assert [one["cause"] for one in whole["resizes"]] == ["move"]
    assert whole["losses"] == losses


def test_a_job_whose_own_nodes_have_all_left_lasts_as_long_as_its_training(
    place: Place, losses: dict[str, float]
) -> None:
    job = begun(place, elastic={"min_nodes": 1, "max_nodes": 3})
    assert place.hp_ext("resize", URL, "--nodes", "3").code == 0
    place.cluster.ask("scancel", "--signal=TERM", job)  # to all processes of its step
    until(lambda: all((place.start_dir(job) / f"node{node}.left").exists() for node in (0, 1)))
    assert place.hp_ext("status", URL, "-o", "json").json["state"] == "running"
    hurry(place, job, "0.0")
    whole = ended(place)
    assert (whole["starts"], whole["steps_lost"], whole["recoveries"], whole["nodes_lost"]) == (1, 0, [], [])
    assert whole["resizes"][-1]["nodes"] == 1
    assert whole["losses"] == pytest.approx(losses, rel=2e-3, abs=1e-4)


def test_a_step_that_is_started_again_has_the_nodes_that_are_left(place: Place) -> None:
    job = begun(place, elastic={"min_nodes": 1, "max_nodes": 3}, relaunch={"max_times": 1})
    assert place.hp_ext("resize", URL, "--nodes", "1").code == 0
    for agent in agents_in(place.folder).values():
        os.kill(agent, signal.SIGKILL)
    hurry(place, job, "0.1")
    assert ended(place)["starts"] == 2
    assert report(place.start_dir(job, "0.1"))["world_size"] == 1


def test_nodes_of_another_allocation_end_when_the_job_is_taken_away(place: Place) -> None:
    job = begun(place, elastic={"min_nodes": 1, "max_nodes": 3})
    assert place.hp_ext("resize", URL, "--nodes", "3").code == 0
    place.cluster.ask("scancel", job)  # and not the job that brought the third node
    until(lambda: not place.cluster.ask("squeue", "-h", "--me").strip())
    last = max(map(int, report(place.start_dir(job))["losses"]))
    assert durable_step(place.folder / "kept" / "tiny-gpt") >= last - 1


def test_a_job_goes_on_after_its_time_limit_with_the_same_losses(place: Place, losses: dict[str, float]) -> None:
    job = begun(place, timeouts={"run_s": 600}, slurm={**python(place), "requeue_at_limit": True})
    place.cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    went_on(place, job, losses)


def test_a_job_whose_nodes_others_need_goes_on_later_with_the_same_losses(
    place: Place, losses: dict[str, float]
) -> None:
    job = begun(place, scheduling={"queue": "low"})
    place.cluster.ask("sbatch", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    went_on(place, job, losses)


def went_on(place: Place, job: str, losses: dict[str, float]) -> None:
    """A second start of the job makes the steps that are left, from the one that was saved when it was told to end."""
    until(lambda: (place.start_dir(job, "0.0") / "report.json").exists())  # a time limit is a minute at least
    until(lambda: (place.start_dir(job, "1.0") / "events.jsonl").exists())
    place.cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    hurry(place, job, "1.0")
    whole = ended(place)
    assert (whole["starts"], whole["losses"]) == (2, losses)
    first, second = (report(place.start_dir(job, start))["losses"] for start in ("0.0", "1.0"))
    assert max(map(int, first)) >= 5
    assert min(map(int, second)) - max(map(int, first)) in (0, 1), "it went on from the newest step"


def python(place: Place) -> dict[str, Any]:
    place.write_job()
    found: dict[str, Any] = json.loads((place.folder / "job.yaml").read_text())["slurm"]
    return found
