"""A whole cluster in one process: real agents and coordinators on simulated time, with five faults a seed.

`HPX_CLUSTER_SEED=17 pytest -s tests/faults/test_cluster_in_one_process.py` runs one seed and prints its story.
`make test-thorough HPX_CLUSTER_SEEDS=1000` runs so many; 20,000 without it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster.cluster import run_faults, run_seed, run_seeds
from cluster.event_loop import Process, SimulatedLoop
from cluster.faults import Fault, Setting

pytestmark = [
    pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

ONE = os.environ.get("HPX_CLUSTER_SEED")
SEEDS = int(os.environ.get("HPX_CLUSTER_SEEDS", "20000"))
"""How many seeds `make test-thorough` runs, beyond those of `make test`."""
several = pytest.mark.skipif(ONE is not None, reason="HPX_CLUSTER_SEED asks for one seed")


def check(first: int, last: int, *, continues: bool = False) -> None:
    for outcome in run_seeds(first, last, continues=continues):
        story = "\n".join(outcome.story)
        assert not outcome.violations, f"{story}\nthis seed alone: HPX_CLUSTER_SEED={outcome.seed}"


@pytest.mark.skipif(ONE is None, reason="HPX_CLUSTER_SEED says which")
def test_the_seed_that_was_asked_for():
    outcome = run_seed(int(str(ONE)), tells=True)
    print("\n".join(outcome.story))
    assert not outcome.violations


@several
@pytest.mark.parametrize(
    "first", [0, 150, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(30, 150, 30))]
)
def test_clusters_with_five_faults_each_keep_what_is_promised(first: int):
    check(first, first + 30)


@several
@pytest.mark.parametrize("seed", [6542, 14844])
def test_a_broken_connection_costs_no_node_and_no_job(seed: int):
    """An agent voted for a node that goes on with its coordinator, or for one that votes for another."""
    check(seed, seed + 1)


@several
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(180, 180 + SEEDS, 1000))
def test_thousands_of_clusters(first: int):
    check(first, min(first + 1000, 180 + SEEDS))


@several
@pytest.mark.parametrize("seed", [3, 5])
def test_messages_handed_over_as_objects_tell_the_same_story_as_encoded_ones(seed: int):
    as_objects, encoded = (run_seed(seed, tells=True, passes=passes) for passes in (True, False))
    assert as_objects.story == encoded.story


@several
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 900, 300))
def test_clusters_whose_healthy_ranks_continue_keep_the_same_promises(first: int):
    check(first, first + 300, continues=True)


def steady(nodes: int, spares: int, *, continues: bool = False) -> Setting:
    return Setting(nodes, spares, 1, sharing="same", steps=15, step_s=0.7, continues=continues)


@several
@pytest.mark.parametrize("kind", ["kill a worker", "lose a node"])
def test_healthy_ranks_continue_and_the_lost_one_joins_them(kind: str):
    outcome = run_faults(steady(4, 1, continues=True), Fault(5.0, kind, 0.4, 0.0, returns=False))
    story = "\n".join(outcome.story)
    assert not outcome.violations, story
    assert outcome.states == ["succeeded"], story
    worlds = [line for line in outcome.story if "world {" in line]
    assert ["'continued'" in worlds[0], "'rejoined'" in worlds[1]] == [True, True], story
    assert len(worlds) == 2, story


@several
def test_a_node_that_is_started_again_before_its_silence_is_noticed_is_taken_again():
    outcome = run_faults(steady(3, 1), Fault(5.0, "a node falls silent", 0.4, 1.0, returns=True))
    story = "\n".join(outcome.story)
    assert not outcome.violations, story
    assert outcome.states == ["succeeded"], story
    assert story.count("node_joined {'node': 1}") == 2, story


@several
def test_a_coordinator_that_is_cut_off_stands_down_before_its_losses_end_the_job():
    outcome = run_faults(steady(6, 2), Fault(5.0, "cut off", 0.0, 0.0, returns=False))
    story = "\n".join(outcome.story)
    assert not outcome.violations, story
    assert outcome.states == ["succeeded"], story
    assert "log of node 0: stepped_down" in story, story
    assert "log of node 0: node_lost" not in story, story


@several
def test_a_coordinator_whose_connections_all_ended_while_it_stood_still_does_not_end_the_job():
    outcome = run_faults(steady(6, 2), Fault(5.0, "pause an agent", 0.0, 8.7, returns=False))
    story = "\n".join(outcome.story)
    assert not outcome.violations, story
    assert outcome.states == ["succeeded"], story
    assert "log of node 0: stepped_down" in story, story


@several
def test_an_agent_whose_coordinator_has_not_said_a_word_comes_again():
    lost = Fault(5.0, "a node falls silent", 0.4, 0.2, returns=True)
    outcome = run_faults(steady(3, 1), lost, Fault(5.4, "pause an agent", 0.0, 2.2, returns=False))
    story = "\n".join(outcome.story)
    assert not outcome.violations, story
    assert outcome.states == ["succeeded"], story
    assert "agent 1 ends: succeeded" in story, story


@several
@pytest.mark.parametrize("after_ms", range(2, 16, 2))
def test_a_worker_that_dies_while_its_agent_votes_is_started_again(after_ms: int):
    death = Fault(5.0 + after_ms / 1000, "kill a worker", 0.99, 0.0, returns=False)
    outcome = run_faults(steady(5, 0), Fault(5.0, "lose a node", 0.0, 0.5, returns=True), death)
    story = "\n".join(outcome.story)
    assert not outcome.violations, story  # least of all that a rank is late
    assert outcome.states == ["succeeded"], story


@several
def test_a_seed_tells_the_same_story_in_every_process():
    def story(hash_seed: int) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        command = [
            sys.executable,
            "-c",
            "from cluster.cluster import run_seed; print('\\n'.join(run_seed(1, tells=True).story))",
        ]
        done = subprocess.run(command, cwd=Path(__file__).parent, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    stories = {story(1), story(2), "\n".join(run_seed(1, tells=True).story) + "\n"}
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
