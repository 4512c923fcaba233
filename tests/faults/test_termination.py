"""Slurm signals every process of a step, not the agents alone: what workers hold in memory is saved all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from resizing import ELASTIC, settings

from hyperpod_ext.processes import descendants

pytestmark = [pytest.mark.slow]


def signal_all_of(agent: Any) -> None:
    """SIGTERM to the agent's whole tree, itself last."""
    for pid in [*reversed(descendants(agent.pid)), agent.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


IN_A_WORKER = """
import multiprocessing, os, signal, time
from hyperpod_ext.runtime.agent import worker_main
worker_main.leave_sigterm_to_the_agent()
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(20):
    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    loader.start()
    loader.terminate()  # at once
    loader.join(30)
    assert loader.exitcode == -signal.SIGTERM, loader.exitcode
os.kill(os.getpid(), signal.SIGTERM)
print("lives")
"""


def test_a_worker_outlives_the_signal_and_what_it_forks_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_WORKER], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def paced(job: Any, folder: Path, nodes: int, **more: Any) -> Any:
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(folder / "durable"), "every_steps": 1000}]
    env = {"HPX_TEST_STEPS": "500", "HPX_TEST_SECONDS": "0.2"}
    made = settings(checkpoint={"tiers": tiers}, **more)
    return job(nodes=nodes, workers_per_node=1, script=ELASTIC, settings=made, env=env).start()


@pytest.mark.thorough
def test_a_job_whose_every_process_is_told_to_end_brings_home_its_newest_step(job: Any, tmp_path: Path) -> None:
    running = paced(job, tmp_path, 2, elastic={"min_nodes": 2})
    running.until("step", step=5)
    for agent in running.agents:
        signal_all_of(agent)
    report = running.wait()
    assert report["state"] == "cancelled", report["error"]
    last = max(int(step) for step in report["losses"])
    saved = {int(file.parent.name.split("-")[1]) for file in (tmp_path / "durable").rglob("step-*/manifest.json")}
    assert last >= 5
    assert max(saved) >= last - 1, "of a step that was under way, some ranks may not have told yet"


@pytest.mark.thorough
def test_a_node_whose_every_process_is_told_to_end_leaves_without_a_fault(job: Any, tmp_path: Path) -> None:
    running = paced(job, tmp_path, 3)
    running.until("step", step=5)
    signal_all_of(running.agents[2])
    left = running.until("resized")
    assert (left["of"], left["nodes"], left["cause"], left["pids_kept"]) == (3, 2, "leave", True)
    assert running.agents[2].wait() == 0
    assert (running.folder / "node2.left").exists()
    (running.folder / "hurry").touch()
    report = running.wait()
    assert (report["state"], report["recoveries"], len(report["losses"])) == ("succeeded", [], 500)
