"""A whole cluster in one process: real agents and coordinators on simulated time, with five faults a seed.

`HPX_CLUSTER_SEED=17 pytest -s tests/faults/test_cluster_in_one_process.py` runs one seed and prints its story.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster.cluster import run_seed
from cluster.event_loop import Process, SimulatedLoop

ONE = os.environ.get("HPX_CLUSTER_SEED")
several = pytest.mark.skipif(ONE is not None, reason="HPX_CLUSTER_SEED asks for one seed")


def check(first: int, last: int) -> None:
    for seed in range(first, last):
        outcome = run_seed(seed)
        story = "\n".join(outcome.story)
        assert not outcome.violations, f"{story}\nthis seed alone: HPX_CLUSTER_SEED={seed}"


@pytest.mark.skipif(ONE is None, reason="HPX_CLUSTER_SEED says which")
def test_the_seed_that_was_asked_for():
    outcome = run_seed(int(str(ONE)))
    print("\n".join(outcome.story))
    assert not outcome.violations


@several
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_clusters_with_five_faults_each_keep_what_is_promised(first: int):
    check(first, first + 30)


@several
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(300, 20_300, 500))
def test_twenty_thousand_clusters(first: int):
    check(first, first + 500)


@several
def test_a_seed_tells_the_same_story_in_every_process():
    def story(hash_seed: int) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        command = [sys.executable, "-c", "from cluster.cluster import run_seed; print('\\n'.join(run_seed(1).story))"]
        done = subprocess.run(command, cwd=Path(__file__).parent, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    stories = {story(1), story(2), "\n".join(run_seed(1).story) + "\n"}
    assert len(stories) == 1
    assert "coordinates" in stories.pop()


@several
def test_a_paused_process_does_what_was_due_when_it_goes_on_and_a_dead_one_never():
    loop = SimulatedLoop()
    did: list[tuple[str, float]] = []
    paused, dead = (Process(loop, name, "host", 0.0) for name in ("paused", "dead"))

    async def run() -> None:
        for process in (paused, dead):
            process.soon(lambda process=process: did.append((process.name, loop.time())), 1.0)
        paused.pause()
        dead.kill()
        await asyncio.sleep(5.0)
        paused.resume()
        await asyncio.sleep(1.0)

    loop.run_until_complete(run())
    loop.end()
    assert did == [("paused", 5.0)]
