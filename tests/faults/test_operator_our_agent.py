"""Our agent in every pod, in the place of hyperpodrun, and a stand-in for the operator: exception, kill, hang, lost pod."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from event_log import events_in

START = [sys.executable, "-m", "hyperpod_ext.runtime.operator_api"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Any, Any]]]:
    """A function that runs a job of 2 x 2 ranks on pods to its end: what ranks saw, the operator, and the event log."""
    made: list[Any] = []

    def run_job(
        *, fault: Any = None, pods: int = 2, each_poll: Any = None, hang: Any = None, durable: bool = False
    ) -> tuple[Any, Any, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("h", numbered=True)  # short, for the paths of sockets
        job = OurJob(folder / "job", fault or {}, durable=durable)
        port = launched.free_ports() + 10
        command = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-port", str(port + 1), "--", str(launched.TINY)]
        env = job.env()
        places = [OurPod(number, folder / f"p{number}", command, port, env) for number in range(pods)]
        operator = operators.Operator(places, nodes=2)
        if each_poll is not None:
            operator.each_poll = lambda its, status: each_poll(job, its)
        made.append(operator)
        operator.run()
        return job, operator, events_in(job.folder / "events.jsonl")

    yield run_job
    for operator in made:
        operator.end()
        for pod in operator.pods:
            print(f"--- pod {pod.number}\n{(pod.folder / 'agent.log').read_text()[-6000:]}")


class OurPod(operators.Pod):
    """A pod that our agent runs in."""

    def command_line(self) -> list[str]:
        at = ["--server-host", self.ip, "--server-port", str(self.port)]
        return [*START, *at, *self.command]


class OurJob(launched.Launched):
    """One that our agents write the log and the report of."""

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


def test_a_job_without_faults(run, undisturbed):
    job, operator, events = run()
    print(operator.last, [e for e in events if e["event"] in ("job_ended",)])
    launched.assert_equal(job, undisturbed)
