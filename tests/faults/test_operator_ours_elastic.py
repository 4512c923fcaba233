"""Our agent in every pod: what the operator stops and starts again, on as many nodes or on others, stays in place."""

from __future__ import annotations

import itertools
import json
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from instance_metadata import NOTICE, instance_metadata
from launched import losses, weights
from waiting import PATIENCE_S, until

from hyperpod_ext.ports import free_port

SCRIPT = Path(__file__).with_name("elastic_bitwise.py")
STEPS = 400
"""Of a tenth of a second each, until the operator has done all that it does: a pod that comes imports first."""

_IMDS = "AWS_EC2_METADATA_SERVICE_ENDPOINT"

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

Run = Callable[..., tuple[launched.LoggedByAgents, operators.Operator]]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A function that runs a job of one rank a node on `pods`, with `changes`: after which step of rank 0 what is done
    to it."""
    made: list[operators.Operator] = []

    def run_job(
        nodes: int,
        pods: int,
        changes: dict[int, Callable[[operators.Operator], None]],
        env_of: Mapping[int, dict[str, str]] = MappingProxyType({}),
        **elastic: Any,
    ) -> Any:
        folder = tmp_path_factory.mktemp("o", numbered=True)  # short, for the paths of sockets
        job = launched.LoggedByAgents(folder / "job", steps=STEPS)
        env = job.elastic_env(nodes, elastic={"min_nodes": 1, "max_nodes": 3, **elastic})
        port = free_port() + 10
        command = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-port", str(port + 1), "--", str(SCRIPT)]
        envs = [env | env_of.get(number, {}) for number in range(pods)]
        places = [operators.OurPod(place, folder / f"p{place}", command, port, its) for place, its in enumerate(envs)]
        left = dict(changes)

        def each_poll(operator: operators.Operator, status: Any) -> None:
            if len(job.of("resized")) < len(operator.resizes):
                return  # a pod that comes imports first, and the others train meanwhile
            steps = [event["step"] for event in job.of("step") if event["rank"] == 0]
            for after in [after for after in left if steps and max(steps) >= after]:
                left.pop(after)(operator)
            if not left:
                (job.folder / "hurry").touch()

        operator = operators.Operator(places, nodes=nodes, each_poll=each_poll)
        made.append(operator)
        operator.run()
        assert not left
        return job, operator

    yield run_job
    for operator in made:
        operator.end()


def resize(nodes: int) -> Callable[[operators.Operator], None]:
    return lambda operator: operator.resize(nodes)


def drain(operator: operators.Operator) -> None:
    """The last pod's node is drained: the pod is told to end, and the operator goes on with one less."""
    *operator.active, leaving = operator.active
    assert leaving.agent is not None
    leaving.agent.terminate()
    leaving.agent.wait(PATIENCE_S)
    operator.nodes -= 1
    operator.resizes.append({"of": operator.nodes + 1, "nodes": operator.nodes})
    stop_and_start(is_graceful=True, timeout=30)(operator)


def stop_and_start(**body: Any) -> Callable[[operators.Operator], None]:
    """As an operator that was restarted does: it calls pods that are ready, or train, twice."""

    def calls(operator: operators.Operator) -> None:
        for pod in operator.active * 2:
            pod.ask("/stop", body)
        operator.wait_for(operator.active, "ready")
        operator.start_pods()
        operator.start_pods()

    return calls


def test_the_operator_stops_and_starts_and_resizes_a_job_whose_processes_stay(run: Run) -> None:
    alone, _ = run(1, 1, {})
    job, operator = run(
        2,
        3,
        {
            4: stop_and_start(restart_mode="process_level_restart"),
            8: stop_and_start(is_graceful=True, timeout=30),
            12: resize(3),
            24: drain,
            32: resize(1),
        },
    )
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert [(one["of"], one["nodes"]) for one in operator.resizes] == [(2, 3), (3, 2), (2, 1)]
    assert operator.faults == []
    assert job.of("fault") == []
    assert [(one["nodes"], one["pids_kept"]) for one in job.of("resized")] == [(3, True), (2, True), (1, True)]
    assert len(job.of("worker_started")) == 3, "one process for each rank, from its start to its end"
    made = [(e["step"], e["world"]) for e in job.of("step") if e["rank"] == 0]
    assert [step for step, _ in made] == list(range(1, STEPS + 1)), "no step was made twice"
    assert [world for world, _ in itertools.groupby(world for _, world in made)] == [2, 3, 2, 1]


def refused(nodes: int, why: str) -> Callable[[operators.Operator], None]:
    """The operator starts a number of nodes that the job cannot have, and is told so; then as many as before."""

    def calls(operator: operators.Operator) -> None:
        for pod in operator.active:
            pod.ask("/stop", {})
        operator.wait_for(operator.active, "ready")
        for rank, pod in enumerate(operator.active):
            with pytest.raises(urllib.error.HTTPError) as found:
                pod.ask("/start", operator.info_of(rank) | {"nnodes": nodes})
            assert found.value.code == 409
            assert json.loads(found.value.read())["detail"] == why
        operator.start_pods()

    return calls


def test_a_pod_with_a_notice_leaves_a_job_of_discrete_sizes_whose_processes_stay(run: Run) -> None:
    """A Spot notice comes to one pod alone; a number of nodes between the sizes is refused."""
    with instance_metadata() as imds:

        def notice(operator: operators.Operator) -> None:
            imds.notices["spot"] = NOTICE
            told = until(lambda: (said := operator.active[-1].status())["status"] == "faulted" and said)
            assert (told["restartMode"], told["message"]) == (
                "process_level_restart",
                "a pod of the job was ordered to end",
            )
            drain(operator)

        env_of = {0: {_IMDS: imds.of("stays")}, 1: {_IMDS: imds.of("spot")}}
        why = "nnodes is 3; the job has 2 nodes, and may have 1, 4 after /stop"
        changes = {4: refused(3, why), 8: notice}
        told = {"notices": {"ec2": True, "every_s": 0.1}, "sizes": [1, 2, 4], "max_nodes": 4}
        job, operator = run(2, 2, changes, env_of, **told)
    alone, _ = run(1, 1, {})
    assert losses(job) == losses(alone)
    assert weights(job) == weights(alone)
    assert [event["cause"] for event in job.of("preemption_notice")] == ["EC2 will terminate this Spot instance"]
    assert (operator.faults, job.of("fault")) == ([], [])
    assert [(one["nodes"], one["cause"], one["pids_kept"]) for one in job.of("resized")] == [(1, "leave", True)]
    assert len(job.of("worker_started")) == 2, "one process for each rank"
    made = [event["step"] for event in job.of("step") if event["rank"] == 0]
    assert made == list(range(1, STEPS + 1)), "no step was made twice"
