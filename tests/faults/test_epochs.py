"""`run.epochs` through a kill in a batch, and in the work after an epoch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "epochs.py"
RARE = {"checkpoint": {"tiers": [{"kind": "memory", "every_steps": 1000}]}}
"""No snapshot but the first, and those before an epoch's last step."""


def length(sampler: str) -> int:
    """Steps of an epoch: 44 samples in batches of 4, on two ranks, which share them or not."""
    return 11 if sampler == "random" else 6


def ends(running: Any, rank: int) -> list[str]:
    return (running.folder / f"ends-{rank}").read_text().splitlines()


def described(sampler: str, workers: int, **more: Any) -> dict[str, Any]:
    env = {"HPX_TEST_SAMPLER": sampler, "HPX_TEST_WORKERS": str(workers)}
    return {"script": SCRIPT, "nodes": 1, "workers_per_node": 2, "env": env | more.pop("env", {}), **more}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, job_class: Any) -> Any:
    """A function that gives a run with nothing going wrong, and its report."""

    @functools.cache
    def run(sampler: str) -> tuple[Any, dict[str, Any]]:
        running = job_class(tmp_path_factory.mktemp(sampler) / "job", **described(sampler, 0)).start()
        report = running.wait()
        assert report["state"] == "succeeded", running.logs()
        steps = length(sampler)
        assert len(set(report["losses"].values())) == 3 * steps
        for rank in range(2):
            done = [line.split() for line in ends(running, rank)]
            assert [(int(epoch), int(step)) for epoch, _, step in done] == [(e, (e + 1) * steps - 1) for e in range(3)]
        return running, report

    return run


@pytest.mark.parametrize(
    ("sampler", "workers", "kill", "settings"),
    [
        ("distributed", 0, [1, 9, "batch"], {}),
        ("distributed", 2, [0, 6, "end"], RARE),
        ("own", 0, [0, 13, "batch"], RARE),
        ("own", 2, [1, 15, "batch"], {}),
        ("random", 2, [1, 14, "batch"], {}),
        ("random", 0, [0, 33, "end"], {}),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, list) else str(value) if value else "0",
)
def test_a_kill_changes_no_bit(
    job: Any, undisturbed: Any, sampler: str, workers: int, kill: list[Any], settings: dict[str, Any]
) -> None:
    expected, wanted = undisturbed(sampler)
    env = {"HPX_TEST_KILL": json.dumps(kill)}
    running = job(**described(sampler, workers, env=env, settings=settings)).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == wanted["losses"]
    assert report["weights"] == wanted["weights"] != ""
    assert report["steps_lost"] == 0
    assert [recovery["fault"]["rank"] for recovery in report["recoveries"]] == [kill[0]]
    for rank in range(2):
        assert list(dict.fromkeys(ends(running, rank))) == ends(expected, rank), "the same work after the same steps"
