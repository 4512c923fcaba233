"""Target local with the real agent and real training: whatever ends it, nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import unprotected_scripts
from command import Begun, begin_hp_ext, call_hp_ext
from event_log import events_in
from local_place import LocalPlace, slow_down
from waiting import until

from hyperpod_ext.runtime.events.of_training import UNPROTECTED

pytestmark = pytest.mark.slow

SMALL = ("--width", "16", "--layers", "1")
ONE_NODE = ("--set", "nodes=1", "--set", "workers_per_node=4")


def in_shared_memory() -> set[Path]:
    """What lies there, but for what tests beside this one put there."""
    return {
        path
        for path in Path("/dev/shm").iterdir()
        if not path.name.startswith(("test-", "simulated-", "torch_", "sem.", "psm_"))
    }


@pytest.fixture
def spec(root: Path, tmp_path: Path) -> Path:
    """The example, small and too long to end by itself."""
    for name in ("job.yaml", "train.py"):
        shutil.copy(root / "examples" / "01-local" / name, tmp_path)
    return tmp_path / "job.yaml"


def create_job(spec: Path, *options: str, steps: int = 100_000, cold: bool = False) -> Begun:
    if steps > 1000:
        slow_down(spec.with_name("train.py"))
    arguments = json.dumps(["--steps", str(steps), *SMALL])
    return begin_hp_ext(
        "create-job", "-f", spec, "--set", f"args={arguments}", "--wait", "-o", "json", *options, cold=cold
    )


def wait_for_step(place: LocalPlace, step: int = 3) -> None:
    events = place.home / "local" / "tiny-gpt" / "0001" / "main" / "events.jsonl"
    wanted = f'"event": "step", "rank": 0, "step": {step},'
    until(lambda: events.exists() and wanted in _ordered(events), "no step was made")


def _ordered(events: Path) -> str:
    """Events with the fields that are looked for in a fixed order."""
    lines = events_in(events)
    keys = ("event", "rank", "step", "t")
    return "\n".join(json.dumps({key: line[key] for key in keys if key in line}) for line in lines)


def test_the_example_survives_its_fault_and_is_equal_to_the_undisturbed_run(place: LocalPlace, spec: Path) -> None:
    before = in_shared_memory()
    done = create_job(spec, steps=20).wait()
    assert done.code == 0, done.stderr
    result = done.json
    assert (result["steps"], result["steps_lost"], len(result["recoveries"])) == (20, 0, 1)
    assert (result["loss_equal"], result["weights_equal"]) == (True, True)
    assert result["recoveries"][0]["survivor_pids_kept"] is True
    assert 0 < result["goodput"] < 1
    shown = call_hp_ext("logs", "tiny-gpt").stdout
    assert [line.partition(",")[0] for line in shown.splitlines()] == ["rank 0 | step 10", "rank 0 | step 20"]
    assert place.leftovers() == []
    assert in_shared_memory() <= before


@pytest.mark.parametrize(
    "how",
    ["cancel", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("ctrl-c", "engine killed"))],
)
def test_a_job_that_is_ended_in_the_middle_leaves_nothing(place: LocalPlace, spec: Path, how: str) -> None:
    before = in_shared_memory()
    running = create_job(spec, "--no-kill")
    wait_for_step(place)
    if how == "ctrl-c":
        os.kill(running.process.pid, signal.SIGINT)
    elif how == "cancel":
        assert call_hp_ext("cancel", "tiny-gpt").stdout == "tiny-gpt: cancelled\n"
    else:
        keeper = (place.home / "local" / "tiny-gpt" / "0001" / "engine.pid").read_text().strip()
        engine = Path(f"/proc/{keeper}/task/{keeper}/children").read_text()
        os.kill(int(engine), signal.SIGKILL)
    done = running.wait()
    assert done.code == (130 if how == "ctrl-c" else 7)
    state = call_hp_ext("status", "tiny-gpt", "-o", "json").json["state"]
    assert state == ("failed" if how == "engine killed" else "cancelled")
    assert place.leftovers() == []
    assert in_shared_memory() <= before


def test_a_script_that_raises_fails_the_job_with_its_error(place: LocalPlace, spec: Path) -> None:
    (spec.parent / "train.py").write_text("raise RuntimeError('no such luck')\n")
    done = create_job(spec, "--no-kill", *ONE_NODE).wait()
    assert (done.code, done.json["state"]) == (7, "failed")
    assert "no such luck" in done.stderr
    assert place.leftovers() == []


@pytest.mark.thorough
def test_a_job_ends_with_its_last_step_in_the_durable_tier_and_all_commands_say_so(
    place: LocalPlace, spec: Path, tmp_path: Path
) -> None:
    """Every fiftieth step is due there, and the job makes 23."""
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": 50}]
    options = ("--no-kill", *ONE_NODE, "--set", f"checkpoint.tiers={json.dumps(tiers)}")
    done = create_job(spec, *options, steps=23).wait()
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.stderr
    assert "step 23 goes to the durable tiers\n" in done.stderr
    assert (done.json["durable"][0]["newest_step"], done.json["warnings"]) == (23, [])
    shown = re.sub(" +", " ", call_hp_ext("report", "tiny-gpt").stdout)
    assert f"newest durable step 23, in {tmp_path}/durable/tiny-gpt\n" in shown
    listed = call_hp_ext("checkpoints", "list", "tiny-gpt", "-o", "json").json["places"][0]["checkpoints"]
    assert [(one["step"], one["state"]) for one in listed] == [(23, "complete"), (0, "complete")]
    assert call_hp_ext("checkpoints", "verify", "tiny-gpt").code == 0


def agent_pid(place: LocalPlace, node: int) -> int:
    """The agent of `node` that runs now."""
    for pid in place.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"hyperpod_ext.runtime.agent" in command and command[command.index(b"--node-rank") + 1] == b"%d" % node:
            return pid
    raise AssertionError(f"node {node} has no agent")


@pytest.mark.thorough
def test_node_0_of_two_killed_is_the_cause_and_the_steps_that_were_made_are_in_the_result(
    spec: Path, place: LocalPlace
) -> None:
    running = create_job(spec, "--no-kill")
    wait_for_step(place)
    os.kill(agent_pid(place, 0), signal.SIGKILL)
    done = running.wait()
    message = done.json["error"]["message"]
    assert (done.code, done.json["state"]) == (7, "failed")
    assert ": node 0 was killed by SIGKILL (9), and was started again. Then: node 1 stops: " in message
    assert done.json["steps"] >= 3
    assert message in call_hp_ext("status", "tiny-gpt").stdout
    assert not place.leftovers()


def test_an_engine_that_was_killed_leaves_the_figures_of_the_job(spec: Path, place: LocalPlace) -> None:
    running = create_job(spec, "--no-kill", *ONE_NODE, cold=True)
    wait_for_step(place)
    keeper = int((place.home / "local/tiny-gpt/0001/engine.pid").read_text())
    (engine_pid,) = map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
    os.kill(engine_pid, signal.SIGKILL)
    done = running.wait()
    assert (done.code, done.json["state"]) == (7, "failed")
    assert "engine died: killed by SIGKILL (9)" in done.json["error"]["message"]
    assert done.json["steps"] >= 3
    assert call_hp_ext("report", "tiny-gpt", "-o", "json").json["steps"] == done.json["steps"]
    assert not place.leftovers()


def test_unprotected_training_is_warned_of_before_it_starts_while_it_runs_and_at_its_end(
    place: LocalPlace, tmp_path: Path
) -> None:
    gate = tmp_path / "go-on"
    waiting = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    script = f"import time\n{unprotected_scripts.PLAIN['train.py']}"
    (tmp_path / "train.py").write_text(script.replace("optimizer.step()\n", f"optimizer.step()\n        {waiting}\n"))
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nscript: train.py\nworkers_per_node: 2\n")
    begun = begin_hp_ext("create-job", "-f", spec, "--wait")
    events = place.home / "local" / "a" / "0001" / "main" / "events.jsonl"
    until(lambda: events.exists() and "unprotected_step" in events.read_text(), "no warning was logged")
    found = [json.loads(line) for line in events.read_text().splitlines() if "unprotected_step" in line]
    # the first rank that the agent sees
    warning = f"warning: rank {found[0]['rank']} makes an optimizer step, but {UNPROTECTED}"
    assert warning in call_hp_ext("status", "a").stderr
    gate.touch()
    done = begun.wait()
    assert done.code == 0, done.stderr
    assert f"{spec}:2: script: `train.py` trains without a @resilient function" in done.stderr
    assert done.stderr.count(warning) == 2, "when it happens, and with the result"
    assert "no step was made" not in done.stderr
    assert warning in call_hp_ext("report", "a").stderr + call_hp_ext("report", "a").stdout
