"""One node of a SageMaker training job, with real agents: the container's folders are made as SageMaker makes them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import AwsStandIn, aws_stand_in
from event_log import events_in
from local_place import slow_down
from training_jobs import job
from waiting import PATIENCE_S

from hyperpod_ext.jobs.sagemaker.container import environment_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# another pair for each process of pytest: a training job's port is always the same
HOSTS = [f"127.{78 + os.getpid() // 250 % 100}.{os.getpid() % 250}.{node}" for node in (1, 2)]
SMALL = ("--width", "16", "--layers", "1")


@pytest.fixture
def aws() -> Iterator[AwsStandIn]:
    with aws_stand_in() as state:
        state.secrets["hyperpod_ext/tiny-gpt"] = "s" * 32
        state.on_GetSecretValue = lambda request: {"SecretString": state.secrets[request["SecretId"]]}  # type: ignore[attr-defined]
        yield state


def container(folder: Path, host: str, script: Path) -> Path:
    """/opt/ml of one node."""
    config = folder / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": host, "hosts": HOSTS[::-1]}))
    values = {"sagemaker_program": json.dumps("train.py"), "sagemaker_job_name": json.dumps("x"), "epochs": "not json"}
    (config / "hyperparameters.json").write_text(json.dumps(values))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(script, "train.py")
    code = folder / "input" / "data" / "code"
    code.mkdir(parents=True)
    (code / "sourcedir.tar.gz").write_bytes(packed.getvalue())
    return folder


def start(folder: Path, aws: AwsStandIn, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    spec = job(nodes=2, global_batch_size=16, restart={"max_restarts": 3})
    env = os.environ | environment_of(spec) | {"HPX_ML_ROOT": str(folder), "AWS_ENDPOINT_URL": aws.url}
    env |= {"AWS_REGION": "us-west-2", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "hyperpod_ext.runtime.container_sagemaker", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(tmp_path: Path, aws: AwsStandIn, script: Path, *arguments: str, kill_at: int | None = None) -> list[Any]:
    """Run both nodes to their end; what each printed, and how it ended."""
    folders = [container(tmp_path / host, host, script) for host in HOSTS]
    nodes = [start(folder, aws, arguments) for folder in folders]
    try:
        if kill_at is not None:
            kill_a_worker(folders[0] / "output/data/hpx-run/events.jsonl", kill_at)
        return [(node.communicate(timeout=90)[0], node.returncode) for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def kill_a_worker(events: Path, step: int) -> None:
    """kill -9 of rank 1 once step `step` was made."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline, "no step was made"
        seen = events_in(events)
        if any(event["event"] == "step" and event["step"] >= step for event in seen):
            break
        time.sleep(0.02)
    (pid,) = [event["pid"] for event in seen if event["event"] == "joined" and event["rank"] == 1]
    os.kill(pid, signal.SIGKILL)


def report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / HOSTS[0] / "output/data/hpx-run/report.json").read_text())
    return found


def test_a_training_job_recovers_a_killed_worker_in_process_with_the_same_losses(
    tmp_path: Path, aws: AwsStandIn, root: Path
) -> None:
    script = Path(shutil.copy(root / "examples" / "01-local" / "train.py", tmp_path))
    slow_down(script)  # so that the kill finds it in the middle
    whole = run(tmp_path, aws, script, "--steps", "30", *SMALL)
    assert [code for _, code in whole] == [0, 0], whole
    undisturbed = report(tmp_path)
    for host in HOSTS:
        shutil.rmtree(tmp_path / host)
    killed = run(tmp_path, aws, script, "--steps", "30", *SMALL, kill_at=5)
    assert [code for _, code in killed] == [0, 0], killed
    disturbed = report(tmp_path)
    assert len(disturbed["recoveries"]) == 1
    assert (disturbed["losses"], disturbed["weights"]) == (undisturbed["losses"], undisturbed["weights"])


def test_the_cause_of_a_failure_is_where_sagemaker_looks_for_it(tmp_path: Path, aws: AwsStandIn) -> None:
    script = tmp_path / "bad.py"
    script.write_text("raise RuntimeError('no such luck')\n")
    ended = run(tmp_path, aws, script)
    assert all(code == 7 for _, code in ended), ended
    assert " | RuntimeError: no such luck" in ended[0][0] + ended[1][0]
    assert "no such luck" in (tmp_path / HOSTS[0] / "output" / "failure").read_text()


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("AccessDeniedException", "secretsmanager:GetSecretValue"),
        ("ResourceNotFoundException", "aws secretsmanager create-secret --name hyperpod_ext/tiny-gpt"),
    ],
)
def test_a_secret_that_cannot_be_read_is_said_so(tmp_path: Path, aws: AwsStandIn, code: str, hint: str) -> None:
    script = tmp_path / "ok.py"
    script.write_text("print()\n")
    aws.on_GetSecretValue = lambda request: (400, {"__type": code, "message": "no"})  # type: ignore[attr-defined]
    ended = run(tmp_path, aws, script)
    assert [code for _, code in ended] == [4, 4]
    assert hint in ended[0][0]
    assert code in (tmp_path / HOSTS[0] / "output" / "failure").read_text()
