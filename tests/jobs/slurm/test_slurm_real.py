"""Target hyperpod-slurm on a real Slurm: three nodes, real sbatch, the rendered file unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import HP_EXT
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_place import (
    TARGET,
    URL,
    Place,
    agents_in,
    done,
    durable_step,
    made_step,
    report,
)
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="hpx-slurm-") as place, slurm_cluster(Path(place), 3) as running:
        yield running


@pytest.fixture
def place(cluster: SlurmCluster, tmp_path: Path, root: Path) -> Iterator[Place]:
    shutil.copy(root / "examples" / "01-local" / "train.py", tmp_path)
    yield Place(cluster, tmp_path)
    with suppress(subprocess.CalledProcessError):
        cluster.ask("scancel", "--me")
    until(lambda: not cluster.ask("squeue", "-h", "--me").strip())


def test_a_job_runs_to_its_end_and_again_through_a_killed_step_with_the_same_losses(place: Place) -> None:
    place.write_job(steps=200)
    whole = place.create("--wait")
    assert whole.code == 0, whole.stderr
    assert (whole.json["state"], whole.json["steps"], whole.json["starts"]) == ("succeeded", 200, 1)
    assert len(whole.json["losses"]) == 200

    shutil.rmtree(place.folder / "kept")  # the second job starts from nothing, too
    place.write_job(steps=200, relaunch={"max_times": 2})
    waiting = place.start("create-job", "-f", "job.yaml", *TARGET, "--wait", "-o", "json")
    job = str(int(whole.json["slurm_job_id"]) + 1)
    until(lambda: durable_step(place.folder / "kept" / "tiny-gpt") > 0)
    for agent in agents_in(place.folder).values():
        os.kill(agent, signal.SIGKILL)
    killed = done(waiting)
    assert killed.code == 0, killed.stderr
    assert (killed.json["state"], killed.json["starts"]) == ("succeeded", 2)
    assert killed.json["losses"] == whole.json["losses"]
    assert killed.json["weights"] == whole.json["weights"]
    assert min(map(int, report(place.start_dir(job, "0.1"))["losses"])) > 1, "the second start began anew"


def lose_power(cluster: SlurmCluster, node: str) -> None:
    """Kill all that runs on a node: slurmd, its steps, the batch script and what they started."""
    space = Path(f"/proc/{cluster.processes[node].pid}/ns/uts").readlink()

    def there() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and (entry / "ns" / "uts").readlink() == space:
                    found.append(int(entry.name))
        return found

    while pids := there():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.processes[node].poll()
        time.sleep(0.01)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", ["hpx1", "hpx2"], ids=["of-the-batch-script", "another"])
def test_a_node_is_lost_and_the_job_is_queued_again_and_goes_on_with_the_same_losses(place: Place, lost: str) -> None:
    place.write_job(steps=200)
    whole = place.create("--wait")
    assert (whole.code, whole.json["starts"]) == (0, 1), whole.stderr

    shutil.rmtree(place.folder / "kept")
    waiting = place.start("create-job", "-f", "job.yaml", *TARGET, "--wait", "-o", "json")
    job = str(int(whole.json["slurm_job_id"]) + 1)
    until(lambda: durable_step(place.folder / "kept" / "tiny-gpt") > 0)
    assert place.cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "hpx[1-2]"
    lose_power(place.cluster, lost)
    try:
        again = done(waiting, 200)
    finally:
        place.cluster.start_node(lost)
        until(lambda: place.cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3")
    assert again.code == 0, again.stderr
    assert (again.json["state"], again.json["starts"], len(again.json["losses"])) == ("succeeded", 2, 200)
    assert again.json["losses"] == whole.json["losses"]
    assert again.json["weights"] == whole.json["weights"]
    assert min(map(int, report(place.start_dir(job, "1.0"))["losses"])) > 1, "it began anew"


def test_a_spare_takes_the_ranks_of_a_node_that_is_lost(place: Place) -> None:
    place.write_job(steps=200, spares=1, slurm={"python": sys.executable, "requeue": False})
    waiting = place.start("create-job", "-f", "job.yaml", *TARGET, "--wait", "-o", "json")
    until(lambda: (place.folder / "hpx-runs" / "tiny-gpt").is_dir() and len(agents_in(place.folder)) == 3)
    (job,) = [entry.name for entry in (place.folder / "hpx-runs" / "tiny-gpt").iterdir() if entry.name.isdecimal()]
    until(lambda: made_step(place.start_dir(job) / "events.jsonl", 5))
    os.kill(agents_in(place.folder)["1"], signal.SIGKILL)
    ended = done(waiting)
    assert ended.code == 0, ended.stderr
    assert (ended.json["state"], ended.json["steps"], ended.json["starts"]) == ("succeeded", 200, 1)


def test_a_running_job_is_shown_followed_refused_a_second_time_and_cancelled(place: Place) -> None:
    place.write_job(steps=100_000)
    submitted = place.create()
    assert (submitted.code, submitted.json["handle"]) == (0, URL), submitted.stderr
    job = place.cluster.ask("squeue", "-h", "--me", "-o", "%i").strip()
    until(lambda: made_step(place.start_dir(job) / "events.jsonl", 3))

    status = place.hp_ext("status", URL, "-o", "json").json
    assert (status["state"], status["of"]) == ("running", 100_000)
    assert status["step"] >= 3
    elsewhere = replace(place, home="elsewhere/home")
    assert [one["handle"] for one in elsewhere.hp_ext("list", *TARGET, "-o", "json").json] == [URL]
    assert elsewhere.hp_ext("status", URL, "-o", "json").json["step"] >= 3
    second = place.create()
    assert (second.code, f"job {job} of the queue" in second.stderr) == (5, True)
    late = place.hp_ext("create-job", "-f", "job.yaml", *TARGET, "--set", "name=other", "--dry-run")
    assert "#SBATCH --job-name=other" in late.stdout

    following = place.start("logs", URL, "--rank", "0", "--follow")
    cancelled = place.hp_ext("cancel", URL, "-o", "json")
    assert cancelled.json["state"] == "cancelled"
    assert all(line.startswith("rank 0 | ") for line in done(following).stdout.splitlines())
    assert not agents_in(place.folder)
    assert place.hp_ext("cancel", URL).stdout == "tiny-gpt: had ended already (cancelled)\n"
    assert place.hp_ext("logs", URL, "--rank", "2").code == 6


def test_a_script_that_raises_fails_the_job_once_with_its_error(place: Place) -> None:
    place.write_job(relaunch={"max_times": 2})
    (place.folder / "train.py").write_text("raise RuntimeError('no such luck')\n")
    failed = place.create("--wait")
    assert (failed.code, failed.json["state"], failed.json["starts"]) == (7, "failed", 1)
    assert "no such luck" in failed.stderr
    assert place.hp_ext("status", URL, "-o", "json").json["error"]["message"]


def test_a_plain_script_has_its_arguments_under_torchrun_and_the_lines_of_its_ranks_are_found(place: Place) -> None:
    words = ["$HOME", "${local_rank}", "$$"]
    place.write_job(mode="plain", workers_per_node=2, args=words, checkpoint={})
    (place.folder / "train.py").write_text("import os, sys\nprint('from', os.environ['RANK'], sys.argv[1:])\n")
    whole = place.create("--wait")
    assert (whole.code, whole.json["state"]) == (0, "succeeded"), whole.stderr
    for rank in range(4):
        assert place.hp_ext("logs", URL, "--rank", str(rank)).stdout == f"rank {rank} | from {rank} {words}\n"


REFUSED = {
    "scheduling.queue": {"scheduling": {"queue": "nope"}},
    "nodes": {"nodes": 9, "global_batch_size": None},
    "slurm": {"slurm": {"sbatch": {"no-such-option": "1"}}},
}


@pytest.mark.parametrize(("path", "fields"), REFUSED.items())
def test_what_slurm_refuses_is_told_with_its_field(place: Place, path: str, fields: dict[str, Any]) -> None:
    place.write_job(**fields)
    refused = place.create()
    assert refused.code == 3
    assert [problem["path"] for problem in refused.json["error"]["problems"]] == [path]


def test_a_controller_that_is_away_is_said_so(place: Place, tmp_path: Path) -> None:
    place.write_job()
    text = place.cluster.conf.read_text()
    text = text.replace("SlurmctldPort=", "MessageTimeout=1\nSlurmctldPort=1\n#")
    (tmp_path / "away.conf").write_text(text)
    env = os.environ | {"SLURM_CONF": str(tmp_path / "away.conf"), "HPX_HOME": str(tmp_path / "home")}
    command = [HP_EXT, "create-job", "-f", "job.yaml", *TARGET]
    away = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert (away.returncode, "scontrol ping" in away.stderr) == (4, True), away.stderr


def test_a_machine_without_slurm_is_said_so(place: Place) -> None:
    place.write_job()
    (place.folder / "bin").mkdir()
    (place.folder / "bin" / "sh").symlink_to("/bin/sh")
    env = {"PATH": str(place.folder / "bin"), "HPX_HOME": str(place.folder / "home")}
    command = [HP_EXT, "create-job", "-f", "job.yaml", *TARGET]
    nowhere = subprocess.run(command, env=env, cwd=place.folder, capture_output=True, text=True, check=False)
    assert (nowhere.returncode, "login" in nowhere.stderr) == (4, True), nowhere.stderr
