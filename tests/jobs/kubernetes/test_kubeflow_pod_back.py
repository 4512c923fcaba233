"""A pod of a Kubeflow job whose container has ended and is started again, as its `restartPolicy` has it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launched
import pytest
import yaml
from event_log import events_in
from hyperpod_ext.cli.report.runs import read_run
from waiting import PATIENCE_S, until

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import descendants, is_alive

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]


class Pods:
    """Two, each with two ranks of a job that makes 12 steps."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder, self.running = folder, dict[int, subprocess.Popen[bytes]]()
        tiers = [{"kind": "memory"}, {"kind": "peer"}, {"kind": "file", "path": str(folder / "durable")}]
        document = {
            "name": "a",
            "script": str(launched.TINY),
            "image": "r:1",
            "nodes": 2,
            "workers_per_node": 2,
            "rendezvous": {"port": free_port()},
            "checkpoint": {"tiers": tiers, "overlap": False},
            "volumes": [{"kind": "host", "path": str(folder), "host_path": str(folder)}],
            **more,
        }
        spec = JobConfig.model_validate_json(json.dumps(document))
        job = yaml.safe_load(make_plan(spec, target="kubeflow").files["job.yaml"])
        self.roles = [*job["spec"]["pytorchReplicaSpecs"].values()]
        self.secret = folder / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text(secrets.token_hex(16))

    def start(self, node: int, **env: str) -> None:
        container = self.roles[node]["template"]["spec"]["containers"][0]
        environ = {one["name"]: one["value"].replace("$$", "$") for one in container["env"] if "value" in one}
        environ |= {"RANK": str(node), "MASTER_ADDR": "127.0.0.1", "TMPDIR": str(self.folder / f"t{node}")}
        environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environ |= {"HPX_SECRET_FILE": str(self.secret), "HPX_RUN_DIR": str(self.folder / f"run{node}"), **env}
        (self.folder / f"t{node}").mkdir(mode=0o700, exist_ok=True)
        command = [*container["command"], container["args"][0].replace("$$", "$")]
        with (self.folder / f"log{node}").open("ab") as log:
            self.running[node] = subprocess.Popen(command, env=environ, cwd=self.folder, stdout=log, stderr=log)

    def lose(self, node: int) -> None:
        agent = self.running.pop(node)
        pids = [agent.pid, *descendants(agent.pid)]
        # at once, as the end of a container's first process is: the agent is told of that end, and would cancel the job
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, signum)
        agent.wait()
        until(lambda: not any(map(is_alive, pids)))

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.folder / "run0" / "events.jsonl")


@pytest.fixture
def pods(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    made = Pods(tmp_path_factory.mktemp("k", numbered=True), **getattr(request, "param", {}))
    yield made
    for node, process in made.running.items():
        for pid in [process.pid, *descendants(process.pid)]:
            if is_alive(pid):
                os.kill(pid, 9)
        process.wait()
        print(f"--- pod {node}\n{(made.folder / f'log{node}').read_text()[-5000:]}")


def started(pods: Pods, rank: int) -> dict[str, str]:
    """Both pods, until all ranks have made step 4 and this one stands still in step 5; returns what they are started
    with."""
    assert [role["restartPolicy"] for role in pods.roles] == ["OnFailure"] * 2
    env = {"HPX_TEST_HOLD": f"[[1, {rank}, 5]]", "HPX_TEST_NORM": "LayerNorm"}
    for node in range(2):
        pods.start(node, **env)

    def is_held() -> bool:
        made = {event["rank"] for event in pods.events() if event["event"] == "step" and event["step"] == 4}
        return made == {0, 1, 2, 3}

    until(is_held)
    return env


def test_a_pod_that_is_started_again_gets_its_ranks_and_the_others_stay(pods: Pods) -> None:
    env = started(pods, rank=2)
    pods.lose(1)
    pods.start(1, **env)
    for process in pods.running.values():
        assert process.wait(PATIENCE_S) == 0
    events = pods.events()
    assert [event["step"] for event in events if event["event"] == "go"] == [0, 4]
    assert sorted(event["rank"] for event in events if event["event"] == "worker_started") == [0, 1, 2, 2, 3, 3]
    kept = read_run(str(pods.folder / "durable" / "a"))
    assert (kept["state"], kept["steps"], kept["steps_lost"]) == ("succeeded", 12, 0)


def test_where_the_first_of_two_pods_is_started_again_both_begin_the_job_anew(pods: Pods) -> None:
    """The other cannot know whether the first trains on somewhere, and ends; it is started again, too."""
    env = started(pods, rank=0)
    pods.lose(0)
    pods.start(0, **env)
    assert pods.running[1].wait(PATIENCE_S) != 0
    pods.start(1, **env)
    for process in pods.running.values():
        assert process.wait(PATIENCE_S) == 0
    kept = read_run(str(pods.folder / "durable" / "a"))
    assert (kept["state"], kept["world_size"]) == ("succeeded", 4)


@pytest.mark.parametrize("pods", [{"restart": {"policy": "continue"}}], indirect=True)
def test_the_others_train_on_while_a_pod_whose_node_is_drained_is_started_again(pods: Pods) -> None:
    env = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_STEPS": "60", "HPX_TEST_SECONDS": "0.3"}
    for node in range(2):
        pods.start(node, **env)
    until(lambda: any(event["event"] == "step" and event["step"] == 4 for event in pods.events()))
    drained = pods.running.pop(1)
    drained.terminate()
    assert drained.wait(PATIENCE_S) == 143, "with restartPolicy OnFailure the kubelet starts it again"
    pods.start(1, **env)
    for process in pods.running.values():
        assert process.wait(PATIENCE_S) == 0
    kept = read_run(str(pods.folder / "durable" / "a"))
    assert (kept["state"], kept["steps"], kept["steps_lost"], kept["recoveries"]) == ("succeeded", 60, 0, [])
    assert [(one["ranks"], one["of"]) for one in kept["continued"]] == [(2, 4)]
