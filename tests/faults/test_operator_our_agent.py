"""Our agent in every pod, in the place of hyperpodrun, and a stand-in for the operator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from event_log import events_in
from hyperpod_ext.cli.report.runs import read_run

from hyperpod_ext.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Any, Any]]]:
    """A function that runs a job of 2 x 2 ranks on pods to its end: what ranks saw, the operator, and the event log."""
    made: list[Any] = []

    def run_job(
        *,
        fault: Any = None,
        pods: int = 2,
        each_poll: Any = None,
        norm: str = "BatchNorm1d",
        hold: Any = (),
        nodes: int = 2,
        **operates: Any,
    ) -> tuple[Any, Any, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("h", numbered=True)  # short, for the paths of sockets
        job = OurJob(folder / "job", fault or {}, norm, durable=True)
        job.nodes = nodes
        port = free_port() + 10
        command = [
            "--nnodes",
            str(nodes),
            "--nproc-per-node",
            str(4 // nodes),
            "--rdzv-port",
            str(port + 1),
            "--",
            str(launched.TINY),
        ]
        env = job.env() | {"HPX_TEST_HOLD": json.dumps(hold)}
        places = [operators.OurPod(number, folder / f"p{number}", command, port, env) for number in range(pods)]
        operator = operators.Operator(places, nodes=nodes, **operates)
        if each_poll is not None:
            operator.each_poll = lambda its, status: each_poll(job, its)
        made.append(operator)
        operator.run()
        return job, operator, events_in(job.folder / "events.jsonl")

    yield run_job
    for operator in made:
        operator.end()


class OurJob(launched.Launched):
    """One that our agents write the log and the report of."""

    nodes = 2

    def env(self) -> dict[str, str]:
        env = super().env()
        runtime = json.loads(env["HPX_RUNTIME"])
        runtime["restart"] = {"hang": {"enabled": self.fault.get("what") == "sleeps", "floor_s": 2.0, "factor": 2.0}}
        runtime["checkpoint"]["tiers"].append({"kind": "peer"})
        runtime |= {"nodes": self.nodes, "workers_per_node": 4 // self.nodes}
        return env | {"HPX_RUNTIME": json.dumps(runtime)}

    def held(self) -> bool:
        """Whether all have made step 4; one stands still in step 5."""
        steps = [e for e in events_in(self.folder / "events.jsonl") if e["event"] == "step"]
        return {e["rank"] for e in steps if e["step"] == 4} == {0, 1, 2, 3}

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


MENDING = ("MendingInPlace", "MendedInPlace")
MENDED = {
    "exception": ({"what": "exception"}, "ValueError: bad sample at step 5"),
    "kill": ({"what": "before backward"}, "killed by SIGKILL"),
    "hang": ({"what": "sleeps", "dies": -1}, "no progress"),
}


@pytest.mark.parametrize("kind", MENDED)
def test_what_a_rank_can_meet_is_mended_in_place_and_the_operator_sees_a_job_that_runs(run, undisturbed, kind):
    fault, cause = MENDED[kind]
    seen = set()

    def look(job: OurJob, its: Any) -> None:
        seen.update(said(its))
        if job.held():  # else a rank that is still about to end step 4 gives that up
            (job.folder / "let-go-5").touch()
        if any(reason in MENDING for _, reason, _ in seen):
            (job.folder / "let-go-12").touch()

    hold = [[1, 2, 5], [2, 0, 12]] if kind != "hang" else []  # until it was met, and until the operator has seen it
    job, operator, events = run(fault=fault | {"rank": 2, "step": 5}, each_poll=look, hold=hold)
    launched.assert_equal(job, undisturbed)
    assert operator.faults == []
    assert [event["step"] for event in events if event["event"] == "go"] == [0, 4]
    (fault,) = [event for event in events if event["event"] == "fault"]
    assert (fault["rank"], fault["step"]) == (2, 5)
    assert cause in fault["cause"]
    assert {state for state, _, _ in seen} <= {"running", "completed"}
    assert any(reason in MENDING and cause in why for _, reason, why in seen), seen
    calls = [
        (event["call"], event["caller"], event["status"]) for event in events if event["event"] == "operator_asked"
    ]
    assert calls == []
    for pod in operator.pods:
        pod.kill()
    kept = read_run(str(job.folder / "durable" / "tiny"))  # what is left of the job beside its checkpoints
    assert (kept["state"], kept["steps"], kept["steps_lost"], kept["world_size"]) == ("succeeded", 12, 0, 4)
    assert [(one["rank"], one["step"]) for one in kept["faults"]] == [(2, 5)]
    assert kept["losses"] == undisturbed["losses"]


def test_a_rank_that_breaks_a_log_rule_of_the_operator_is_replaced_in_place(run, undisturbed):
    fault = {
        "what": "code",
        "where": "in a step",
        "rank": 0,
        "step": 5,
        "code": "print('the link is down', flush=True)",
    }
    rule = {"name": "link", "logPattern": ".*link is down", "faultOnMatch": True}
    job, operator, events = run(fault=fault, hold=[[1, 0, 5]], log_rules=[rule])
    launched.assert_equal(job, undisturbed)
    assert operator.faults == []
    (met,) = [event for event in events if event["event"] == "fault"]
    assert (met["rank"], met["step"], met["kind"]) == (0, 5, "log-rule")
    assert met["cause"].startswith("log rule link: rank 0 printed 'the link is down', which is a fault")


def said(operator: Any) -> list[tuple[str, str, str]]:
    """What the pods told, in short."""
    return [(one["status"], one.get("reason", ""), one.get("message", "")) for one in operator.last.values()]


@pytest.mark.parametrize(
    ("place", "poll_s", "nodes"),
    [
        pytest.param(1, 0.05, 2, id="second pod"),
        pytest.param(1, 3.0, 2, id="slow polls"),
        pytest.param(0, 0.05, 2, id="first pod"),
        pytest.param(0, 0.05, 4, id="first of four", marks=pytest.mark.soak),
    ],
)
def test_a_lost_pod_comes_back_as_a_spare_into_the_generation_that_waits(run, alike, place, poll_s, nodes):
    def lose(job: Any, operator: Any) -> None:
        if not operator.faults and job.held():
            operator.pods[place].kill()

    job, operator, events = run(
        pods=nodes + 1, nodes=nodes, each_poll=lose, norm="LayerNorm", hold=[[1, 2 * place, 5]], poll_s=poll_s
    )
    launched.assert_equal(job, alike)
    assert len(operator.faults) == 1
    assert [event["step"] for event in events if event["event"] == "go"] == [0, 4]


def test_a_pod_that_is_started_after_the_end_says_so(run, alike):
    """One that was lost when all ranks were done is replaced, though nobody needs it: it begins nothing anew."""
    job, operator, _ = run(pods=3, norm="LayerNorm")
    launched.assert_equal(job, alike)
    first, lost, late = operator.pods
    lost.kill()
    operator.active = [first, late]
    late.ask("/update", operator.info_of(1))
    late.ask("/start", operator.info_of(1) | {"progress": {}})
    operator.wait_for([late], "completed")
    assert [event["event"] for event in launched.events_in(job.folder / "events.jsonl")].count("generation") == 1
