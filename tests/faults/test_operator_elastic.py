"""The operator's elastic policy through the real `hyperpodrun`: it stops all gracefully, and starts another number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import launched
import pytest
from hyperpodrun_env import hyperpodrun
from launched import losses, weights

from hyperpod_ext.ports import free_port

SCRIPT = Path(__file__).with_name("elastic_bitwise.py")
STEPS = 60
WORKERS = ["--nproc-per-node", "1", "--tee", "3", "--redirect", "3", "--server-log-level", "warning"]

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

Run = Callable[..., tuple[launched.Launched, operators.Operator]]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made: list[operators.Operator] = []

    def run_job(
        nodes: int, pods: int, changes: dict[int, int], parallel: str = "ddp", peer: bool = False, hear_at: str = ""
    ) -> Any:
        """`changes`: after which step of rank 0 the operator goes to how many nodes."""
        folder = tmp_path_factory.mktemp("e", numbered=True)  # short, for the paths of sockets
        job = launched.Launched(folder / "job", steps=STEPS)
        env = {**job.elastic_env(nodes, peer=peer), "HPX_TEST_PARALLEL": parallel, "NNODES": str(nodes)}
        env |= {"HPX_TEST_HEAR_AT": hear_at} if hear_at else {}
        command = [str(hyperpodrun()), "--nnodes", str(nodes), *WORKERS, str(SCRIPT)]
        port = free_port() + 10
        places = [operators.Pod(number, folder / f"p{number}", command, port, env) for number in range(pods)]
        left = dict(changes)

        def each_poll(operator: operators.Operator, status: Any) -> None:
            steps = [event["step"] for event in job.events() if event["event"] == "step" and event["rank"] == 0]
            due = [after for after in left if steps and max(steps) >= after]
            for after in due:
                operator.resize(left.pop(after))
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


def test_graceful_shrink_and_grow_cost_no_step_and_no_bit(run: Run) -> None:
    alone, _ = run(1, 1, {})
    job, operator = run(2, 4, {10: 1, 20: 3, 32: 2})
    assert [(one["of"], one["nodes"]) for one in operator.resizes] == [(2, 1), (1, 3), (3, 2)]
    assert not operator.faults
    assert losses(job) == losses(alone)
    assert set(losses(job)) == set(range(1, STEPS + 1))
    assert weights(job) == weights(alone)
    assert_stopped_together(job)
    made = [(e["step"], e["world"]) for e in job.events() if e["event"] == "step" and e["rank"] == 0]
    assert [step for step, _ in made] == list(range(1, STEPS + 1)), "no step was made twice"
    assert [world for world, _ in itertools.groupby(world for _, world in made)] == [2, 1, 3, 2]


@pytest.mark.parametrize("step", [STEPS, STEPS + 1], ids=["in the last step", "after it"])
def test_nodes_that_change_at_the_very_end_do_not_begin_it_all_again(run: Run, step: int) -> None:
    job, operator = run(2, 2, {step - 1: 1}, hear_at=f"2@{step}")
    assert [(one["of"], one["nodes"]) for one in operator.resizes] == [(2, 1)]
    assert not operator.faults
    made = [event["step"] for event in job.events() if event["event"] == "step" and event["rank"] == 0]
    assert made == list(range(1, STEPS + 1)), "no step was made twice"
    assert job.went_on_from() == [0, STEPS]
    assert weights(job) == weights(run(1, 1, {})[0])


@pytest.mark.soak
def test_shards_of_a_pod_that_leaves_are_in_its_peers_memory(run: Run) -> None:
    alone, _ = run(1, 1, {}, "fsdp2")
    job, _ = run(2, 3, {10: 1, 20: 2}, "fsdp2", peer=True)
    assert weights(job) == weights(alone)
    made = [event["step"] for event in job.events() if event["event"] == "step" and event["rank"] == 0]
    assert made == list(range(1, STEPS + 1)), "no step was made twice"


def assert_stopped_together(job: launched.Launched) -> None:
    """All ranks of a world stopped after the same step, and the next went on from it."""
    stops: dict[int, set[int]] = {}
    ranks: dict[int, set[int]] = {}
    for event in job.events():
        if event["event"] == "stopped":
            stops.setdefault(event["generation"], set()).add(event["step"])
            ranks.setdefault(event["generation"], set()).add(event["rank"])
    assert all(len(steps) == 1 for steps in stops.values()), stops
    assert [len(each) for _, each in sorted(ranks.items())] == [2, 1, 3]
    assert job.went_on_from() == [0, *(steps.pop() for _, steps in sorted(stops.items()))]
