"""The real `hyperpodrun` 1.1.3 in every pod, a stand-in for the operator, and the three kinds of faults."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
import waiting
from hyperpod_ext.cli.report.runs import read_run
from hyperpodrun_env import hyperpodrun

from hyperpod_ext.ports import free_port

WORKERS = ["--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", "--redirect", "3", "--server-log-level", "warning"]


pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """A function that runs a job on pods to its end, and gives what the ranks and the operator saw of it."""
    made: list[Any] = []

    def run_job(
        *flags: str,
        fault: Any = None,
        norm: str = "BatchNorm1d",
        pods: int = 2,
        each_poll: Any = None,
        durable: bool = False,
        hold: Sequence[Sequence[int]] = (),
        ready: bool = False,
    ) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("h", numbered=True)  # short, for the paths of sockets
        job = launched.Launched(folder / "job", fault or {}, norm, durable)
        env = {
            **job.env(),
            "HPX_TEST_HOLD": json.dumps(hold),
            "NNODES": "2",
            "HPX_PORT_BASE": str(free_port()),
        }
        front = ["-m", "hyperpod_ext.runtime.prefork"] if ready else []
        command = [str(hyperpodrun()), *flags, *WORKERS, *front, str(launched.TINY)]
        port = free_port() + 10
        places = [operators.Pod(number, folder / f"p{number}", command, port, env) for number in range(pods)]
        operator = operators.Operator(places, nodes=2)
        if each_poll is not None:
            operator.each_poll = lambda its, status: each_poll(job, its)
        made.append(operator)
        operator.run()
        return job, operator

    yield run_job
    for operator in made:
        operator.end()


def test_an_exception_is_met_in_process_at_the_operators_word(run, undisturbed):
    job, operator = run("--inprocess-restart", fault={"what": "exception", "rank": 2, "step": 5}, durable=True)
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    (fault,) = operator.faults
    assert fault["mode"] == "in_process_restart"
    assert "rank 2, step 5: ValueError: bad sample at step 5" in fault["status"][1]["message"]
    assert all(len(set(job.pids(rank))) == 1 for rank in range(4)), "every process stayed"
    assert [one["progress"]["tiny"]["progressCount"] for one in operator.last.values()] == [12, 12]


def test_for_a_process_that_cannot_use_its_gpu_any_more_a_new_one_is_asked_for(run, undisturbed):
    job, operator = run("--inprocess-restart", fault={"what": "illegal access", "rank": 2, "step": 5})
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    (fault,) = operator.faults
    assert fault["mode"] == "process_level_restart"
    assert len(set(job.pids(2))) == 2


def test_a_killed_rank_costs_its_node_the_processes_and_nobody_a_step(run, undisturbed):
    fault = {"what": "before backward", "rank": 2, "step": 5}
    job, operator = run("--inprocess-restart", fault=fault, durable=True)
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    assert "SIGKILL" in operator.faults[0]["status"][1]["message"]
    assert [len(set(job.pids(rank))) for rank in range(4)] == [1, 1, 2, 2]
    for pod in operator.pods:
        pod.kill()
    kept = read_run(str(job.folder / "durable" / "tiny"))
    assert (kept["state"], kept["steps"], kept["steps_lost"], kept["world_size"]) == ("succeeded", 12, 0, 4)
    (told,) = kept["faults"]
    assert (told["rank"], told["node"], told["step"]) == (2, 1, 5)
    (recovery,) = kept["recoveries"]
    assert not recovery["survivor_pids_kept"], "hyperpodrun ended its neighbour, too"
    assert 0 < kept["goodput"] < 1
    assert kept["losses"] == undisturbed["losses"]


def test_a_killed_rank_comes_back_with_its_imports_done(run, undisturbed):
    seconds = {}
    for ready in (False, True):
        fault = {"what": "before backward", "rank": 2, "step": 5}
        job, operator = run("--inprocess-restart", fault=fault, ready=ready)
        launched.assert_equal(job, undisturbed)
        assert job.went_on_from() == [0, job.committed(1)]
        assert "SIGKILL" in operator.faults[0]["status"][1]["message"]
        assert [len(set(job.pids(rank))) for rank in range(4)] == [1, 1, 2, 2]
        steps = [event for event in job.events() if event["event"] == "step"]
        last = max(event["t"] for event in steps if event["generation"] == 1)
        seconds[ready] = min(event["t"] for event in steps if event["generation"] == 2) - last
    print(
        f"last step to first new step: {seconds[False]:.2f} s with imports, {seconds[True]:.2f} s with a ready process"
    )
    for pod in operator.pods:
        pod.agent.kill()
        pod.agent.wait()
        waiting.until(lambda pod=pod: not any("prefork" in _command(pid) for pid in pod.processes()))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_lost_node_is_replaced_by_the_spare(run, job):
    """Its memory is lost with it: what all ranks hold alike comes from those that live."""
    wanted = job("undisturbed", env={"HPX_TEST_NORM": "LayerNorm"}).start().wait()
    lost: list[int] = []

    def lose_node(its: Any, operator: Any) -> None:
        if not lost and its.committed(1) == 4:
            lost.append(operator.active[1].number)
            operator.active[1].kill()

    hold = [[1, rank, 5] for rank in (2, 3)]
    found, operator = run("--inprocess-restart", norm="LayerNorm", pods=3, each_poll=lose_node, hold=hold)
    launched.assert_equal(found, wanted)
    assert lost == [1]
    assert operator.faults[0]["status"][1]["status"] == "unreachable"
    assert operator.active[1].number == 2, "the spare"
    assert found.went_on_from()[1] >= found.committed(1) == 4, "no step was lost"
    assert [len(set(found.pids(rank))) for rank in range(4)] == [1, 1, 2, 2]


@pytest.mark.soak
def test_without_in_process_restarts_all_processes_begin_again_from_memory(run, undisturbed):
    job, operator = run(fault={"what": "before backward", "rank": 2, "step": 5})
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    assert operator.faults[0]["mode"] == "process_level_restart"
    assert [len(set(job.pids(rank))) for rank in range(4)] == [2, 2, 2, 2]
