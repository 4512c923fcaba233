"""Real jobs read through the elastic loader: killed ranks lose and repeat no sample."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.runtime.data import ElasticBatchSampler

SCRIPT = Path(__file__).parent / "elastic_data.py"

pytestmark = pytest.mark.slow


def expected(steps: Iterable[int]) -> dict[int, set[tuple[int, ...]]]:
    """Micro-batches of each step, as one rank alone has them."""
    sampler = ElasticBatchSampler(
        range(101), global_batch_size=12, micro_batch_size=2, rank=0, world_size=1, fingerprint="numbers"
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
    env = {"HPX_TEST_WORKERS": kind}
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
    assert re.search(r"another fingerprint .* on ranks 0, 1, 3, '\S+' on rank 2 ", report["error"]["message"])
    assert report["generations"] == 1
    assert not report["losses"]
