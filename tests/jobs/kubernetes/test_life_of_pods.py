"""A job on pods that run as processes under a real API server: what commands tell of it while its pods live, and after
they are deleted, is what its ranks have measured."""

from __future__ import annotations

import contextlib
import html
import ipaddress
import json
import os
import socket
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import kubelet
import launched
import pytest
from command import call_hp_ext
from crds import SPECS, definition
from event_log import events_in
from kube_apiserver import ApiServer, api_server
from waiting import until

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.submit import submit
from hyperpod_ext.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]  # the first builds the server

JOB = f"{HYPERPOD.path('team-a')}/tiny"
URL = "hyperpod-eks://team-a@here/tiny"
STEPS, FIRST, FAULT, HELD = 24, 6, 12, 18
KILLED = "killed by SIGKILL (9)"
NOBODY_SAW = "its process ended with an unknown exit status; see the launcher's log"
TARGET = ("--target", "hyperpod-eks")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with tempfile.TemporaryDirectory(prefix="hpx-k8s-") as place, api_server(Path(place)) as running:
        running.define(definition(HYPERPOD, SPECS[HYPERPOD.name]()))
        running.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "team-a"}})
        yield running


@pytest.fixture
def here() -> str:
    """An address of this machine that the API server forwards to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing
        found = str(probe.getsockname()[0])
    if ipaddress.ip_address(found).is_loopback or found == "0.0.0.0":
        pytest.skip("this machine has no address but 127.0.0.1, which the server forwards nothing to")
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as name:
        yield Path(name)


class Job:
    """It stands still in two places: at its beginning, and after its fault."""

    def __init__(self, server: ApiServer, folder: Path, launcher: str, here: str) -> None:
        self.server, self.port, self.tier = server, free_port(), folder / "fsx"
        self.launcher, self.metrics = launcher, self.port + 30
        spec = {
            "name": "tiny",
            "script": str(launched.TINY),
            "image": "repo/tiny:1",
            "nodes": 2,
            "workers_per_node": 2,
            "working_dir": str(folder),
            "metrics": {"port": self.metrics},
            "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "file", "path": str(self.tier)}]},
            "volumes": [{"kind": "host", "path": str(self.tier), "host_path": str(self.tier)}],
            "restart": {"hang": {"enabled": False}},
            "kubernetes": {"launcher": launcher},
            "env": {
                "HPX_TEST_STEPS": str(STEPS),
                "HPX_TEST_HOLD": json.dumps([[1, 0, FIRST], [2, 0, HELD]]),
                "HPX_TEST_NORM": "LayerNorm",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        }
        self.tier.mkdir()
        image = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        submit(make_plan(JobConfig.model_validate_json(json.dumps(spec)), target="hyperpod-eks"))
        server.condition(JOB, "Running")
        self.pods = kubelet.make_pods(server, "team-a", "tiny", folder, self.port, here, {"PATH": image})
        self.operator = operators.Operator(list(self.pods), nodes=2)
        self.runs = threading.Thread(target=self.operator.run)

    def events(self) -> list[dict[str, Any]]:
        files = [file for pod in self.pods for file in pod.run_dir.glob("events*.jsonl")]
        return sorted((event for file in files for event in events_in(file)), key=lambda event: event["t"])

    def steps(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events() if event["event"] == "step"}

    def until_step(self, step: int) -> None:
        until(lambda: max(self.steps(), default=0) >= step or not self.runs.is_alive())
        assert self.runs.is_alive(), self.operator.last

    def until_ordered(self) -> None:
        """Until the rank finds the fault that was ordered at its next change of phase; under hyperpodrun it looks by
        itself."""
        until(lambda: self.launcher != "ours" or any(event["event"] == "fault_ordered" for event in self.events()))

    def leave(self, step: int) -> None:
        """Let ranks leave the place where they stand still in that step; they stop at the next one, whenever they come
        there."""
        (self.pods[0].run_dir / f"let-go-{step}").touch()

    def end(self) -> None:
        for pod in self.pods:
            pod.kill()
            print(f"--- pod {pod.number}\n{(pod.folder / 'agent.log').read_text()[-4000:]}")
        self.runs.join()


@pytest.mark.parametrize("launcher", ["ours", "hyperpodrun"])
def test_what_is_told_of_a_job_while_its_pods_live_and_after_they_are_deleted(
    server: ApiServer, folder: Path, here: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder / "config", namespace="team-a")))
    (folder / "kubectl").write_text(kubelet.KUBECTL)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    job = Job(server, folder, launcher, here)
    job.runs.start()
    try:
        job.until_step(FIRST - 1)
        words = ("chaos", URL, "--sigkill", "--rank", "2", "--step", str(FAULT), "--yes")
        done = call_hp_ext(*words)
        assert done.code == 0, done.stderr
        job.until_ordered()
        job.leave(FIRST)
        job.until_step(HELD - 1)
        while_they_live(job, here)
        job.leave(HELD)
        job.runs.join()
        assert {one["status"] for one in job.operator.last.values()} == {"completed"}
        server.condition(JOB, "Succeeded")
        core = "/api/v1/namespaces/team-a/pods"
        for pod in job.pods:
            server.ask("DELETE", f"{core}/tiny-{pod.number}?gracePeriodSeconds=0")
        measured = job.events()
        for pod in job.pods:
            pod.kill()
        after_they_are_gone(job, measured, folder)
    finally:
        job.end()
        server.ask("DELETE", f"{HYPERPOD.path('team-a')}?gracePeriodSeconds=0")
        server.ask("DELETE", "/api/v1/namespaces/team-a/pods?gracePeriodSeconds=0")


def while_they_live(job: Job, here: str) -> None:
    newest = HELD - 1
    said: dict[str, Any] = {}

    def has_come() -> bool:
        said.update(call_hp_ext("top", "tiny", *TARGET, "--once", "-o", "json").json)
        return bool(said["step"] == newest and said["faults"])  # the first pod hears of the second one's a moment later

    until(has_come, lambda: f"`top` does not come to step {newest} and the fault: {said}")
    assert (said["world_size"], said["nodes"], said["faults"], said["state"]) == (4, 2, 1, "running")
    assert said["loss"] == pytest.approx(job.steps()[newest])
    assert [one["rank"] for one in said["ranks"]] == [0, 1, 2, 3]
    numbers = urllib.request.urlopen(f"http://{here}:{job.metrics}/metrics", timeout=30).read().decode()
    assert f'hpx_step{{hpx_job="tiny"}} {newest}' in numbers
    faults = [line.rpartition(" ")[2] for line in numbers.splitlines() if line.startswith("hpx_faults_total{")]
    assert sorted(faults)[-2:] == ["0", "1"]
    told = until(lambda: (one := call_hp_ext("report", URL, "-o", "json").json)["faults"] and one)
    assert (told["state"], [(one["rank"], one["step"]) for one in told["faults"]]) == ("running", [(2, FAULT)])


def after_they_are_gone(job: Job, measured: list[dict[str, Any]], folder: Path) -> None:
    said = call_hp_ext("top", "tiny", *TARGET, "--once", "-o", "json").json
    assert (said["state"], said["step"], said["faults"]) == ("succeeded", STEPS, 1)
    page = folder / "report.html"
    done = call_hp_ext("report", URL, "--page", str(page), "-o", "json")
    assert done.code == 0, done.stderr
    report = done.json
    assert (report["state"], report["steps"], report["world_size"], report["steps_lost"]) == ("succeeded", STEPS, 4, 0)
    assert {int(step): loss for step, loss in report["losses"].items()} == {
        event["step"]: event["loss"] for event in measured if event["event"] == "step"
    }
    (recovery,) = report["recoveries"]
    steps = [event for event in measured if event["event"] == "step"]
    before = max(event["t"] for event in steps if event["generation"] == 1)
    after = min(event["t"] for event in steps if event["generation"] == 2)
    assert 0 < recovery["seconds"] <= after - before + 1, "from the fault to the first new step"
    assert 0 < report["goodput"] < 1
    text = page.read_text()
    assert "tiny" in text
    how = recovery["fault"]["cause"]
    # hyperpodrun may have waited for its child before anybody else could see how that ended
    assert how == KILLED or (job.launcher == "hyperpodrun" and how == NOBODY_SAW)
    assert how in html.unescape(text)
    (listed,) = call_hp_ext("list", "--kept", str(job.tier), "-o", "json").json
    assert (listed["name"], listed["state"], listed["step"]) == ("tiny", "succeeded", STEPS)
    plan = call_hp_ext("plan", "--params", "1B", "--nodes", "2", "--history", str(job.tier / "tiny"), "-o", "json")
    assert plan.code == 0, plan.stderr
    # an ordered fault says nothing about how often machines fail
    assert any("process failures: 0 in" in note for note in plan.json["notes"]), plan.json["notes"]
