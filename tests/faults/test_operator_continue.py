"""`restart.policy: continue` with our agent in every pod: the other pods train on while the operator replaces a lost
one, and the pod that comes joins them between two steps. Each loss and the weights are those of one rank, bit for bit.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from launched import losses, weights
from waiting import PATIENCE_S, until

from hyperpod_ext.ports import free_port

SCRIPT = Path(__file__).with_name("elastic_bitwise.py")
STEPS = 400
"""Of a tenth of a second each, until the operator has done all that it does: a pod that comes imports first."""

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]


class Job(launched.LoggedByAgents):
    def made(self) -> list[tuple[int, int]]:
        """Of each step in turn: its number, and of how many ranks it was."""
        return [(event["step"], event["world"]) for event in self.of("step") if event["rank"] == 0]


class PatientOperator(operators.Operator):
    """Starts pods again once those that are left have made steps since they were stopped, or the last one."""

    job: Job
    waits_for = "steps"

    def start_pods(self) -> None:
        if self.faults and self.waits_for == "the end":
            (self.job.folder / "hurry").touch()
            until((self.job.folder / "report.json").exists, "the others do not come to the end")
        elif self.faults and self.waits_for == "steps":
            made = len(self.job.made())
            until(lambda: len(self.job.made()) > made + 2, "the others make no step")
        super().start_pods()


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Job, Any]]]:
    """A function that runs a job of `nodes` with one rank each, and loses the pod at place `lost` after some steps."""
    made: list[operators.Operator] = []

    def run_job(
        nodes: int,
        lost: int | None = None,
        policy: str = "continue",
        *,
        lose: Callable[[Any], None] = operators.OurPod.kill,
        waits_for: str = "steps",
    ) -> Any:
        folder = tmp_path_factory.mktemp("c", numbered=True)  # short, for the paths of sockets
        job = Job(folder / "job", steps=STEPS)
        env = job.elastic_env(nodes, restart={"policy": policy})
        port = free_port() + 10
        command = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-port", str(port + 1), "--", str(SCRIPT)]
        pods = [operators.OurPod(place, folder / f"p{place}", command, port, env) for place in range(nodes + 1)]

        def each_poll(operator: operators.Operator, status: Any) -> None:
            steps = job.made()
            if lost is None or (operator.faults and steps[-1][1] == nodes):
                (job.folder / "hurry").touch()
            elif not operator.faults and steps and steps[-1][0] >= 4:
                lose(operator.active[lost])

        operator = PatientOperator(pods, nodes=nodes, each_poll=each_poll)
        operator.job, operator.waits_for = job, waits_for
        made.append(operator)
        operator.run()
        return job, operator

    yield run_job
    for operator in made:
        operator.end()


def end(pod: operators.OurPod) -> None:
    """As Kubernetes ends a pod that is deleted, or whose node is drained."""
    pod.agent.terminate()
    pod.agent.wait(PATIENCE_S)


@pytest.mark.parametrize("lost", [2, 0])
def test_the_other_pods_train_on_while_the_operator_replaces_a_lost_one(run, lost):
    """Pod 0 takes the coordinator with it."""
    alone, _ = run(1, policy="wait")
    job, operator = run(3, lost)
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert len(operator.faults) == 1
    made = job.made()
    assert [world for world, _ in itertools.groupby(world for _, world in made)] == [3, 2, 3]
    assert [step for step, _ in made] == sorted({step for step, _ in made}), "none is made twice"
    assert [(one["cause"], one["pids_kept"]) for one in job.of("resized")] == [("continued", True), ("rejoined", True)]
    ended = alone.folder.parent / "p0"
    assert "created again" not in (ended / "agent.log").read_text(), "an agent whose job is over needs no socket"
    assert not (ended / "sockets" / "node0.agent").exists()


def stop_silently(pod: operators.OurPod) -> None:
    """Freeze the pod like a machine without power: the operator notices that before half of the lease is over."""
    for pid in pod.processes():
        os.kill(pid, signal.SIGSTOP)
    pod.port = free_port()


@pytest.mark.parametrize("lost", [2, 0])
def test_the_operator_may_stop_the_others_before_they_notice_the_loss(run, lost):
    alone, _ = run(1, policy="wait")
    job, operator = run(3, lost, lose=stop_silently)
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert len(operator.faults) == 1
    assert [world for world, _ in itertools.groupby(world for _, world in job.made())] == [3, 2, 3]
    asked, noticed = (job.of(kind)[0]["t"] for kind in ("operator_asked", "node_lost"))
    assert asked < noticed


@pytest.mark.parametrize("lost", [2, 0])
def test_a_pod_that_is_told_to_end_leaves_the_others_which_train_on(run, lost):
    alone, _ = run(1, policy="wait")
    job, operator = run(3, lost, lose=end)
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert len(operator.faults) == 1
    assert job.of("fault") == []
    assert [event["node"] for event in job.of("node_leaves")] == [lost]
    assert [world for world, _ in itertools.groupby(world for _, world in job.made())] == [3, 2, 3]
    assert [step for step, _ in job.made()] == sorted({step for step, _ in job.made()}), "none is made twice"


def test_of_two_pods_the_second_goes_on_once_the_operator_says_that_the_first_is_gone(run):
    """Before, the first might train on somewhere else."""
    alone, _ = run(1, policy="wait")
    job, _ = run(2, 0, waits_for="nothing")
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert {world for _, world in job.made()} >= {2}


def test_a_job_that_ends_before_a_lost_pod_is_replaced_has_ended_for_all_pods(run):
    """None begins it anew: those that the operator has stopped meanwhile, and the one that comes, say so."""
    alone, _ = run(1, policy="wait")
    job, operator = run(2, 1, waits_for="the end")
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert len(operator.faults) == 1
    assert {status["status"] for status in operator.last.values()} == {"completed"}
    assert [world for world, _ in itertools.groupby(world for _, world in job.made())] == [2, 1]
    assert [step for step, _ in job.made()] == list(range(1, STEPS + 1)), "none is made twice"
