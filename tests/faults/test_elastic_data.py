"""Real jobs read through the elastic loader: killed ranks lose and repeat no sample."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.runtime.data import ElasticBatchSampler

SCRIPT = Path(__file__).parent / "elastic_data.py"
SAMPLES, STEPS_AN_EPOCH = 101, 9

pytestmark = pytest.mark.slow


def expected(steps: Iterable[int]) -> dict[int, set[tuple[int, ...]]]:
    """Micro-batches of each step, as one rank alone has them."""
    sampler = ElasticBatchSampler(
        range(SAMPLES), global_batch_size=12, micro_batch_size=2, rank=0, world_size=1, fingerprint="numbers"
    )
    found: dict[int, set[tuple[int, ...]]] = {}
    for step in steps:
        found[step] = {tuple(slot.ids) for slot in sampler.step()}
        sampler.ack()
    return found


def read_by(folder: Path) -> dict[int, set[tuple[int, ...]]]:
    """Micro-batches of each step that the ranks wrote down; those of a step made again are the same ones."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            step, ids = json.loads(line)
            found.setdefault(step, set()).add(tuple(ids))
    return found


@pytest.mark.parametrize("kind", ["process", pytest.param("thread", marks=pytest.mark.thorough)])
def test_killed_ranks_leave_every_step_with_its_samples(job: Any, kind: str) -> None:
    env = {"HPX_TEST_WORKERS": kind, "HPX_TEST_DROPOUT": "0.5"}
    faults = [{"rank": 1, "step": 3}, {"rank": 3, "step": 8}, {"rank": 0, "step": 11}]
    undisturbed = job("undisturbed", script=SCRIPT, env=env).start().wait()
    disturbed = job("disturbed", script=SCRIPT, env=env, settings={"chaos": {"faults": faults}}).start()
    report = disturbed.wait()
    assert report["state"] == "succeeded", report["error"]
    assert len(report["recoveries"]) == 3
    assert read_by(disturbed.folder) == expected(range(1, 13))
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]


def test_a_rank_with_other_data_ends_the_job_before_the_first_step(job: Any) -> None:
    report = job(script=SCRIPT, env={"HPX_TEST_WORKERS": "thread", "HPX_TEST_OTHER_DATA": "2"}).start().wait()
    assert report["state"] == "failed"
    assert report["error"]["code"] == "JobFailedError"
    assert re.search(
        r"fingerprint of the data differs between ranks: .* on ranks 0, 1, 3, '\S+' on rank 2 ",
        report["error"]["message"],
    )
    assert report["generations"] == 1
    assert not report["losses"]


def lines_of(folder: Path) -> list[tuple[int, list[int]]]:
    """Every micro-batch that ranks wrote down, with its step; what a killed one was writing is left out."""
    lines = [line for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def kept(place: Path) -> int:
    """The newest step that is whole in a directory of checkpoints."""
    return max((int(path.parent.name.split("-")[1]) for path in place.glob("*/step-*/manifest.json")), default=0)


def kill_all(running: Any) -> None:
    for pid in running.processes():
        with suppress(ProcessLookupError):  # some end with their agent
            os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.parametrize("every_steps", [1, 3])
def test_a_job_that_is_killed_whole_goes_on_with_other_numbers_of_ranks(
    job: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, every_steps: int
) -> None:
    """Nothing outlives a start but the shared directory; steps and samples are those of one rank that never died."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the same at every start of the job")
    durable = {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": every_steps, "keep": 3}
    settings = {"checkpoint": {"tiers": [{"kind": "memory"}, durable], "when_busy": "wait"}}

    def start(name: str, nodes: int, workers: int, stays: int = 0, **more: Any) -> Any:
        env = {"HPX_SECRET_FILE": str(secret), "HPX_TEST_STEPS": str(3 * STEPS_AN_EPOCH), "HPX_TEST_STAYS": str(stays)}
        env["HPX_SOCKET_DIR"] = str(tmp_path_factory.mktemp("s"))
        return job(name, script=SCRIPT, nodes=nodes, workers_per_node=workers, env=env, **more).start()

    shapes = [
        (2, 2, 6),
        (3, 1, 14),
        (1, 1, 19),
        (3, 2, None),
    ]  # nodes, workers a node, and the step after which all die
    starts, report = [], None
    for number, (nodes, workers, last) in enumerate(shapes):
        # later than what it is killed for, but not by all that is left
        running = start(f"start{number}", nodes, workers, stays=0 if last is None else last + 4, settings=settings)
        if last is None:
            report = running.wait()
            assert report["state"] == "succeeded", report["error"]
        else:
            assert any(kept(tmp_path / "durable") >= last for _ in running.events()), running.logs()
            kill_all(running)
            running.codes()
        starts.append(lines_of(running.folder))
    begins = [min(step for step, _ in lines) for lines in starts]
    assert begins[0] == 1
    assert all(begin > last for (_, _, last), begin in zip(shapes, begins[1:], strict=False)), "an older copy was taken"
    used: dict[int, list[list[int]]] = {}
    for lines, begin, end in zip(starts, begins, [*begins[1:], 3 * STEPS_AN_EPOCH + 1], strict=True):
        for step, ids in lines:
            if begin <= step < end:  # what the weights that were gone on from have seen
                used.setdefault(step, []).append(ids)
    for epoch in range(3):
        seen = [
            one for step, parts in used.items() if (step - 1) // STEPS_AN_EPOCH == epoch for ids in parts for one in ids
        ]
        assert sorted(seen) == [*range(SAMPLES)], f"epoch {epoch}"
    wanted = expected(range(1, 3 * STEPS_AN_EPOCH + 1))
    assert {step: {tuple(ids) for ids in parts} for step, parts in used.items()} == wanted
    undisturbed = start("undisturbed", 1, 1).wait()
    assert report is not None
    assert len(report["losses"]) == 3 * STEPS_AN_EPOCH + 1 - begins[-1]
    for step, loss in report["losses"].items():
        assert loss == pytest.approx(undisturbed["losses"][step], rel=1e-5), f"step {step}"
