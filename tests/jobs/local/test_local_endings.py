"""Every process of a local job but its ranks is ended wherever the job may be: docs/faults.md says what follows.

Its table is what is tested here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import HP_EXT, hp_ext
from endings_table import Ending, endings
from event_log import events_in
from local_place import LocalPlace
from local_victims import agent_of, engine_of, fork_server_of, keeper_of, memory_server_of
from waiting import until

from hyperpod_ext.processes import is_alive

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "faults" / "phases.py"
SIGNALS = {
    "`kill -9`": signal.SIGKILL,
    "Ctrl-C": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "closed": signal.SIGHUP,
}
THOROUGH = {("coordinator", "in a save"), ("memory server", "in a step")}
"""Each row costs some nine seconds of CPU, as three nodes import torch; the others are in `make soak`."""


def each(endings: list[Ending]) -> pytest.MarkDecorator:
    def mark(ending: Ending) -> pytest.MarkDecorator:
        return pytest.mark.thorough if (ending.what, ending.where) in THOROUGH else pytest.mark.soak

    named = [(ending, f"{ending.what}, {ending.how.strip('`')}, {ending.where}") for ending in endings]
    return pytest.mark.parametrize("ending", [pytest.param(one, id=name, marks=mark(one)) for one, name in named])


VICTIMS: dict[str, Callable[[LocalPlace, int], int]] = {
    "agent": lambda place, terminal: agent_of(place, 1),
    "coordinator": lambda place, terminal: agent_of(place, 0),
    "memory server": lambda place, terminal: memory_server_of(place, 0),
    "fork server": lambda place, terminal: fork_server_of(place, 0),
    "engine": lambda place, terminal: engine_of(place),
    "keeper": lambda place, terminal: keeper_of(place),
    "terminal": lambda place, terminal: terminal,
}


@each(endings())
def test_a_process_that_ends_leads_to_what_the_page_says(place: LocalPlace, tmp_path: Path, ending: Ending) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    spec: dict[str, Any] = {"name": "a", "script": "train.py", "nodes": 2, "workers_per_node": 1}
    spec |= {"env": {"STAYS_AT": ending.where}, "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "peer"}]}}
    spec |= {"elastic": {"min_nodes": 1, "max_nodes": 2}} if ending.where == "in a resize" else {"spares": 1}
    (tmp_path / "job.yaml").write_text(json.dumps(spec))
    command = [HP_EXT, "create-job", "-f", str(tmp_path / "job.yaml"), "--wait", "-o", "json"]
    terminal = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = place.home / "local" / "a" / "0001" / "main"
    if ending.where == "in a resize":
        until(lambda: any(event["event"] == "step" for event in events_in(run / "events.jsonl")), "no step was made")
        assert hp_ext("resize", "a", "--nodes", "1", "--no-wait").code == 0
    until(lambda: (run / "stays").exists() or terminal.poll() is not None, "the job did not come there")
    assert terminal.poll() is None, terminal.communicate()
    victim = VICTIMS[ending.what](place, terminal.pid)
    os.kill(victim, SIGNALS[ending.how])
    until(lambda: not is_alive(victim), "it is still there")
    if run.exists():
        (run / "let-go").touch()
    stdout, stderr = terminal.communicate()
    code = terminal.returncode
    if code < 0:  # the terminal is gone, the job may not be: another one waits for it
        done = hp_ext("wait", "a", "-o", "json", timeout_s=600.0)
        code, stdout = done.code, done.stdout
    assert code == ending.exit_code, stderr
    assert hp_ext("status", "a", "-o", "json").json["state"] == ending.state
    if ending.last_word:
        assert ending.last_word in (hp_ext("status", "a").stdout + stderr)
    if ending.state == "succeeded":
        assert json.loads(stdout)["steps_lost"] == 0
    assert place.leftovers() == []


def test_the_table_has_every_process_and_every_place() -> None:
    table = endings()
    assert {ending.what for ending in table} == VICTIMS.keys()
    places = ("at start-up", "in a step", "in a save", "in a recovery", "in a resize", "at the end")
    for what in VICTIMS:
        assert {ending.where for ending in table if ending.what == what} == set(places), what
