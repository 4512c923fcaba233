"""What an operator does wrong, or a worker before it is in the job, to pods in which our agent runs."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from event_log import events_in
from waiting import until

from hyperpod_ext.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Job(launched.Launched):
    """One on pods that a test calls itself."""

    pods: list[operators.OurPod]
    port: int

    def make(self, nodes: int, hosts: tuple[str, ...] = (), first: int = 0, **env: str) -> Job:
        """With a pod for each node, at addresses of their own."""
        told = self.env()
        runtime = json.loads(told["HPX_RUNTIME"]) | {"nodes": nodes, "workers_per_node": 4 // nodes}
        told |= {"HPX_RUNTIME": json.dumps(runtime), "HPX_TEST_SECONDS": "0.05", **env}
        self.port = free_port() + 10
        flags = ["--nnodes", str(nodes), "--nproc-per-node", str(4 // nodes), "--rdzv-port", str(self.port + 1)]
        command = [*flags, "--", str(launched.TINY)]
        self.pods = [
            operators.OurPod(
                first + place,
                self.folder.parent / f"p{first + place}",
                command,
                self.port,
                told,
                host=hosts[place] if hosts else "",
            )
            for place in range(nodes)
        ]
        for pod in self.pods:
            pod.start()
        self.until_all("ready")
        return self

    def until_all(self, state: str) -> None:
        until(
            lambda: {pod.status()["status"] for pod in self.pods} == {state},
            lambda: str([pod.status() for pod in self.pods]),
        )

    def ranks(self, rank: int, **changes: Any) -> dict[str, Any]:
        table = [{"rank": place, "ip": pod.ip} for place, pod in enumerate(self.pods)]
        said = {"rank": rank, "nnodes": len(self.pods), "faultCount": 0, "master_addr": self.pods[0].ip}
        return {**said, "master_port": str(self.port + 2), "ipVersion": "v0", "rankIps": table, **changes}

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.pods[rank].ask("/start", self.ranks(rank))

    def made(self) -> list[int]:
        events = events_in(self.folder / "events.jsonl")
        return [event["step"] for event in events if event["event"] == "step" and event["rank"] == 0]

    def until_step(self, step: int) -> None:
        until(lambda: max(self.made(), default=0) >= step)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events_in(self.folder / "events.jsonl") if event["event"] == kind]

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


@pytest.fixture
def make_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(nodes: int = 2, fault: Any = None, steps: int = 12, **options: Any) -> Job:
        folder: Path = tmp_path_factory.mktemp("b", numbered=True)  # short, for the paths of sockets
        made.append(Job(folder / "job", fault or {}, "LayerNorm", steps=steps))
        return made[-1].make(nodes, **options)

    yield make
    for job in made:
        for pod in job.pods:
            pod.kill()
            print(f"--- pod {pod.number}\n{(pod.folder / 'agent.log').read_text()[-4000:]}")


@pytest.mark.thorough
@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_pod_that_the_operator_forgets_trains_on_with_the_others(make_job: Any, alike: Any, forgotten: int) -> None:
    """It is neither stopped nor started again. Nobody polls meanwhile, either."""
    job = make_job()
    job.start(0, 1)
    job.until_step(2)
    called = job.pods[1 - forgotten]
    called.ask("/stop", {})
    until(lambda: called.status()["status"] == "ready")
    assert job.pods[forgotten].status()["status"] == "running"
    job.start(1 - forgotten)
    job.until_all("completed")
    launched.assert_equal(job, alike)
    assert job.of("fault") == []
    assert len(job.of("worker_started")) == 4, "no process began anew"


@pytest.mark.thorough
def test_a_pod_that_is_forgotten_at_the_start_is_waited_for(make_job: Any, alike: Any) -> None:
    job = make_job()
    job.start(1)
    until(lambda: job.pods[1].processes()[1:])
    job.start(0)
    job.until_all("completed")
    launched.assert_equal(job, alike)


@pytest.mark.thorough
def test_a_start_with_an_incomplete_table_is_refused_and_the_next_one_is_taken(make_job: Any, alike: Any) -> None:
    """AWS's agent dies of it."""
    job = make_job()
    for rank, pod in enumerate(job.pods):
        said = job.ranks(rank)
        with pytest.raises(urllib.error.HTTPError, match="409"):
            pod.ask("/start", said | {"rankIps": said["rankIps"][:1]})
    assert {pod.status()["status"] for pod in job.pods} == {"ready"}
    job.start(0, 1)
    job.until_all("completed")
    launched.assert_equal(job, alike)


BEFORE_IT_JOINS = {"what": "code", "where": "at start-up", "rank": 2, "code": "os.kill(os.getpid(), 9)"}


def test_a_worker_that_ends_before_it_has_joined_is_replaced(make_job: Any, alike: Any) -> None:
    """AWS's agent stays in INIT for good."""
    job = make_job(fault=BEFORE_IT_JOINS)
    for pod in job.pods:
        until(lambda pod=pod: len(pod.processes()) == 3, "what forks workers, and a memory server, import before that")
    job.start(0, 1)
    job.until_all("completed")
    launched.assert_equal(job, alike)
    assert "killed by SIGKILL" in job.of("fault")[0]["cause"]
    assert [event["rank"] for event in job.of("worker_started")].count(2) == 2


@pytest.mark.thorough
def test_a_worker_that_never_joins_is_a_fault_that_the_operator_sees_and_may_stop(make_job: Any) -> None:
    job = make_job(fault=BEFORE_IT_JOINS | {"always": True})
    job.start(0, 1)
    job.until_all("faulted")
    for pod in job.pods:
        said = pod.status()
        assert said["restartMode"] == "job_level_restart"
        assert "rank 2" in said["message"]
        pod.ask("/stop", {"restart_mode": "job_level_restart"})
    job.until_all("ready")
    for pod in job.pods:
        pod.ask("/shutdown", {})
        assert pod.agent is not None
        assert pod.agent.wait(60) == 0


@pytest.mark.thorough
def test_pods_of_two_jobs_on_one_node_know_nothing_of_each_other(make_job: Any, alike: Any) -> None:
    """They share the node's /dev/shm, and the names of all their sockets; a fault of one is none of the other."""
    one = make_job(fault={"what": "before backward", "rank": 2, "step": 5})
    other = make_job(first=4)
    for job in (one, other):
        job.start(0, 1)
    stranger = other.ranks(1) | {"rankIps": [{"rank": 0, "ip": one.pods[0].ip}, {"rank": 1, "ip": other.pods[1].ip}]}
    with pytest.raises(urllib.error.HTTPError, match="409"):
        other.pods[1].ask("/start", stranger | {"rank": 0})  # it trains as rank 1
    for job in (one, other):
        job.until_all("completed")
        launched.assert_equal(job, alike)
    assert [event["rank"] for event in one.of("fault")] == [2]
    assert other.of("fault") == []


@pytest.mark.thorough
def test_a_pod_whose_address_is_of_ipv6(make_job: Any, alike: Any) -> None:
    job = make_job(nodes=1, hosts=("::1",), fault={"what": "before backward", "rank": 2, "step": 5})
    job.start(0)
    job.until_all("completed")
    launched.assert_equal(job, alike)
    assert [event["rank"] for event in job.of("fault")] == [2]
