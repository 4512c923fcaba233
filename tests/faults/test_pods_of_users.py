"""Pods that do not run as root: the rendered container as a process of user 1000, to the end of its training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pod_process
import pytest
from event_log import events_in
from hyperpodrun_env import hyperpodrun
from waiting import PATIENCE_S

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

USER = {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 2000}
SECRET = "0123456789abcdef"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pod_process.require()
    tmp_path.joinpath("file-system").mkdir()
    return tmp_path / "file-system"


def pod_of(target: str, context: dict[str, Any], **kubernetes: object) -> dict[str, Any]:
    """The pod that a small job has on `target`."""
    document = {
        "name": "tiny",
        "script": str(launched.TINY),
        "image": "repo/tiny:1",
        "env": {"HPX_TEST_STEPS": "3", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        "working_dir": "/",
        "restart": {"preload": ["torch"]},
        "kubernetes": kubernetes,
        "overlay": {"kubernetes": {"pod": {"securityContext": context}}},
    }
    job = JobConfig.model_validate_json(json.dumps(document))
    (found,) = read_all(make_plan(job, target=target).files["job.yaml"])
    spec = found["spec"]
    if "trainer" in spec:
        (node,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = node["template"]["spec"]["template"]["spec"]
        pod["containers"][0] |= {name: spec["trainer"][name] for name in ("command", "args", "env")}
    elif "pytorchReplicaSpecs" in spec:
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    else:
        pod = spec["replicaSpecs"][0]["template"]["spec"]
    return dict(pod)


@pytest.mark.parametrize("api", ["pytorchjob", "trainjob"])
def test_our_agent_trains_as_user_1000_in_a_pod_of_kubeflow(api: str, place: Path) -> None:
    told = {"RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    process = pod_process.PodProcess(pod_of("kubeflow", USER, kubeflow_api=api), place, SECRET, env=told)
    done = run(process.command(shell_of(process).replace(":29400", f":{free_port()}")))
    assert done.returncode == 0, done.stdout
    made = process.written / "hyperpod-ext" / "report.json"
    assert made.stat().st_uid == 1000
    assert json.loads(made.read_text())["state"] == "succeeded"


def test_a_secret_of_root_alone_is_told_by_the_agent(place: Path) -> None:
    pod = pod_of("kubeflow", USER)
    del pod["securityContext"]["fsGroup"]  # which `validate` refuses
    told = {"RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = run(pod_process.PodProcess(pod, place, SECRET, env=told).command())
    assert done.returncode != 0
    assert "cannot read the job's secret" in done.stdout
    assert "needs fsGroup in its pod's securityContext" in done.stdout


@dataclass
class UsersPod(operators.Pod):
    """One that the operator drives, as a process of the pod's user."""

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(self.command, env=None, stdout=log, stderr=log)


@pytest.mark.parametrize("launcher", ["ours", "hyperpodrun"])
def test_a_pod_of_the_operator_trains_as_user_1000(launcher: str, place: Path, tmp_path: Path) -> None:
    port = free_port() + 10
    programs = pod_process.PodProcess.programs
    if launcher == "hyperpodrun":
        programs = (hyperpodrun().parent, *programs)
    folder = tmp_path / "pod"
    told = {"NNODES": "1", "HPX_PORT_BASE": str(port + 5), "HPX_TEST_POD": str(folder)}
    pod = pod_of("hyperpod-eks", USER, launcher=launcher)
    process = pod_process.PodProcess(pod, place, SECRET, programs, told)
    script = shell_of(process)  # beside other tests, its ports are others
    if launcher == "hyperpodrun":
        script = script.replace("exec hyperpodrun", f"exec hyperpodrun --server-port {port}")
    else:
        script = script.replace("--server-port 8080", f"--server-port {port}").replace("29400", str(port + 1))
    place_of_pod = UsersPod(0, folder, process.command(script), port, {})
    operator = operators.Operator([place_of_pod], nodes=1)
    try:
        operator.run()
    finally:
        operator.end()
    assert operator.faults == []
    (log,) = (process.written / "hyperpod-ext").glob("events*.jsonl")
    assert log.stat().st_uid == 1000
    assert [event["step"] for event in events_in(log) if event["event"] == "step"] == [1, 2, 3]


def shell_of(process: pod_process.PodProcess) -> str:
    return pod_process.as_kubernetes_passes(process.pod["containers"][0]["args"][-1])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, start_new_session=True, **output)
    try:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # what it has printed is said
        printed, _ = process.communicate()
        pytest.fail(f"it did not come to its end: {printed}")
    return subprocess.CompletedProcess(command, process.returncode, printed)
