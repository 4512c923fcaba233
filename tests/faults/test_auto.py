"""`every_steps: auto` in a job that runs: the coordinator names the steps, and changes how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.runtime.coordinator.interval_tuner import START_PEER_S


@pytest.mark.thorough
@pytest.mark.slow
def test_a_job_finds_its_own_interval(job: Any, tmp_path: Path) -> None:
    durable = {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": "auto", "every_seconds": 0.5}
    settings = {"checkpoint": {"tiers": [{"kind": "memory"}, durable]}}
    running = job(settings=settings, env={"HPX_TEST_STEPS": "100000"}).start()
    tuned = running.until("tuned", tier="file")
    assert tuned["every_seconds"] == 1.0  # by at most two times, though failures are rare and saves are cheap
    assert running.until("tuned", tier="file", every_seconds=2.0)
    saved = [int(folder.name.split("-")[1]) for folder in (tmp_path / "durable" / "tiny").glob("step-*")]
    assert saved
    assert any(step % 100 for step in saved)


@pytest.mark.thorough
@pytest.mark.slow
def test_copies_on_peers_come_at_the_steps_that_are_named(job: Any) -> None:
    tiers = [{"kind": "memory"}, {"kind": "peer", "every_steps": "auto"}]
    running = job(settings={"checkpoint": {"tiers": tiers}}, env={"HPX_TEST_STEPS": "100000"}).start()
    tuned = running.until("tuned", tier="peer")
    assert tuned["every_seconds"] == 2 * START_PEER_S
    copied = running.until("copying", tier="peer", failed=0)
    assert copied["newest_step"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_snapshots_in_memory_come_as_often_as_the_job_finds_best(job: Any, undisturbed: dict[str, Any]) -> None:
    """The first fault makes it every second step; the second one finds no newer step in memory than there can be."""
    running = job(
        settings={"checkpoint": {"tiers": [{"kind": "memory", "every_steps": "auto"}]}},
        fault={"what": "after optimizer", "rank": 1, "step": 8},
    ).start()
    assert running.until("tuned", tier="memory")["every_steps"] == 2
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    made = {e["step"] for e in running.events() if e["event"] == "step" and e["generation"] == 2 and "snapshot" in e}
    assert made
    assert all(step % 2 == 0 for step in made)
