"""After kills nothing is left behind: no process, no zombie, no folder of ours, no shared memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from event_log import events_in
from waiting import until

from hyperpod_ext.processes import children, descendants, is_alive
from hyperpod_ext.scratch import remove_abandoned

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "leaving.py"


def left_by(running: Any) -> list[dict[str, Any]]:
    """What the script's processes have left so far, each."""
    file = running.folder / "left.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def segment_of(left: dict[str, Any]) -> Path:
    return Path("/dev/shm") / str(left["segment"])


def zombies_of(pid: int) -> list[int]:
    return [child for child in children(pid) if not is_alive(child)]


def test_kills_of_a_rank_and_of_an_agent_leave_nothing(job: Any, sockets: Path) -> None:
    running = job(script=SCRIPT, workers_per_node=1, env={"TMPDIR": str(sockets)}).start()
    pid = running.until("worker_started", rank=1)["pid"]
    running.until("step", rank=1)
    before = [path.name for path in sockets.glob("*/worker*")]
    os.kill(pid, signal.SIGKILL)
    running.until("restored", generation=2)
    (first,) = [left for left in left_by(running) if left["rank"] == 1][:1]
    until(lambda: not segment_of(first).exists(), "a dead rank's shared memory is there")
    agents = [agent.pid for agent in running.agents]
    until(lambda: not [zombie for agent in agents for zombie in zombies_of(agent)], "a dead rank's children are there")
    assert f"worker{pid}" in before
    assert not list(sockets.glob(f"*/worker{pid}"))
    assert not list(sockets.glob("pymp-*"))

    running.agents[1].kill()
    running.agents[1].wait()
    below = descendants(agents[0])
    running.stop()
    assert not [pid for pid in below if is_alive(pid)]
    for folder in remove_abandoned(within=sockets):  # as the next agent to start here does
        assert not folder.exists()
    assert not list(sockets.glob("hpx-*"))
    assert not [left for left in left_by(running) if is_alive(left["apart"])]
    until(lambda: not [left for left in left_by(running) if segment_of(left).exists()], "shared memory is there")
    assert events_in(running.folder / "events.jsonl")
