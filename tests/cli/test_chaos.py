"""hp-ext chaos against a job that runs, and hp-ext report after it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import waiting
from command import Begun, begin_hp_ext
from command import call_hp_ext as hp_ext
from local_place import LocalPlace, slow_down
from nodes import events_in
from stopped import stopped

SMALL = ["--width", "16", "--layers", "1"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["tiny-gpt", "--rank", "1"], 2, "Name one fault"),
        (["tiny-gpt", "--sigkill"], 2, "either --rank or --node"),
        (["tiny-gpt", "--sigkill", "--rank", "1", "--node", "1"], 2, "either --rank or --node"),
        (["tiny-gpt", "--oom", "--node", "1"], 2, "--node works only with"),
        (["tiny-gpt", "--sigkill", "--rank", "1", "--phase", "lunch"], 2, "lunch"),
        (["tiny-gpt", "--sigkill", "--rank", "1"], 6, "no local job named tiny-gpt"),
        (["sagemaker://us-west-2/tiny-gpt", "--sigkill", "--rank", "1"], 3, "faults cannot be requested"),
    ],
)
def test_what_cannot_be_is_told(place: LocalPlace, arguments: list[str], code: int, told: str) -> None:
    done = hp_ext("chaos", *arguments)
    assert done.code == code
    assert told in done.stderr


@pytest.fixture
def spec(root: Path, tmp_path: Path) -> Path:
    for name in ("job.yaml", "train.py"):
        shutil.copy(root / "examples" / "01-local" / name, tmp_path)
    return tmp_path / "job.yaml"


@pytest.mark.slow
def test_faults_are_inflicted_while_the_job_runs_and_told_afterwards(place: LocalPlace, spec: Path) -> None:
    arguments = json.dumps(["--steps", "100000", *SMALL])  # until it is cancelled: commands may take their time
    slow_down(spec.with_name("train.py"))
    options = ("--set", f"args={arguments}", "--set", "chaos.compare=false")
    job = begin_hp_ext("create-job", "-f", spec, "--no-kill", "--wait", *options)
    events = place.home / "local" / "tiny-gpt" / "0001" / "main" / "events.jsonl"
    until(events, "step")
    refused = hp_ext("chaos", "tiny-gpt", "--sigkill", "--rank", "4")
    assert (refused.code, "ranks: 0 to 3" in refused.stderr) == (3, True)
    with standing_still(events):
        step = str(max(event["step"] for event in events_in(events, "step")) + 20)
        later = hp_ext("chaos", "tiny-gpt", "--exception", "--rank", "2", "--step", step, "--phase", "backward")
        assert later.stdout == f"exception requested for rank 2 in step {step}\n"
    until(events, "step", generation=2)
    assert hp_ext("chaos", "tiny-gpt", "--exception", "--rank", "3", "--step", "1").code == 0
    until(events, "fault_missed", rank=3, step=1)
    assert hp_ext("chaos", "tiny-gpt", "--exception", "--rank", "0", "--step", "90000").code == 0
    until(events, "fault_ordered", rank=0, step=90000)
    assert hp_ext("chaos", "tiny-gpt", "--sigkill", "--rank", "1").stdout == "sigkill requested for rank 1\n"
    until(events, "step", generation=3)
    assert hp_ext("cancel", "tiny-gpt").code == 0
    job.wait()
    report = hp_ext("report", "tiny-gpt", "-o", "json").json
    faults, (late, early) = report["faults"], [text for text in report["warnings"] if "was not injected" in text]
    assert late.startswith("exception for rank 3 was not injected: it was meant for step 1, but the rank was in")
    early_told = f"it was meant for step 90000, but the job made {report['steps']} steps."
    assert early == f"exception for rank 0 was not injected: {early_told}"
    assert [(fault["rank"], fault["kind"]) for fault in faults] == [(2, "exception"), (1, "signal")]
    assert (faults[0]["step"], faults[0]["phase"]) == (int(step), "backward")
    told = hp_ext("report", "tiny-gpt").stdout
    raised = f"InjectedError: an injected exception in backward of step {step}"
    assert f"rank 2 on node 1, step {step} (backward): {raised}" in told
    ended = hp_ext("chaos", "tiny-gpt", "--sigkill", "--rank", "1")
    assert (ended.code, "is not running" in ended.stderr) == (5, True)


def start(spec: Path, *more: str) -> Begun:
    """The job of `spec`, and once more undisturbed, to compare with."""
    return begin_hp_ext("create-job", "-f", spec, "--no-kill", "--wait", "--set", "chaos.compare=true", *more)


@contextmanager
def standing_still(events: Path) -> Iterator[None]:
    """No step ends meanwhile: what is ordered for one of the next is there in time."""
    with stopped(next(event["pid"] for event in events_in(events, "joined") if event["rank"] == 0)):
        yield


def until(events: Path, kind: str, **fields: object) -> None:
    """Until the log has an event of this kind with these fields."""
    waiting.until(
        lambda: any(all(event.get(key) == fields[key] for key in fields) for event in events_in(events, kind)),
        f"no event {kind} with {fields}",
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_is_lost_at_a_word_and_the_spare_takes_its_ranks(place: LocalPlace, spec: Path) -> None:
    job = start(spec, "--set", "spares=1", "--set", f"args={json.dumps(['--steps', '150', *SMALL])}")
    events = place.home / "local" / "tiny-gpt" / "0001" / "main" / "events.jsonl"
    until(events, "imported", node=2)
    until(events, "step")
    with standing_still(events):
        assert hp_ext("chaos", "tiny-gpt", "--sigkill", "--node", "1").stdout == "sigkill requested for node 1\n"
    done = job.wait(110)
    assert done.code == 0, done.stderr
    (recovery,) = hp_ext("report", "tiny-gpt", "-o", "json").json["recoveries"]
    assert (recovery["escalation_level"], recovery["fault"]["node"], recovery["fault"]["kind"]) == ("node", 1, "lost")
    assert [event["node"] for event in events_in(events, "node_replaced")] == [2]
    assert re.search(r"weights equal +yes", done.stdout)
    assert place.leftovers() == []


_WAITS = """
def wait_for_copies(step):
    asked = {asked!r}
    if not os.path.exists(asked) or step != int(open(asked).read()):
        return
    newest = {{}}
    while len(newest) < 2 or min(newest.values()) < step - 2:
        time.sleep(0.05)
        for line in open({events!r}):
            if line.endswith("\\n") and (event := json.loads(line))["event"] == "copying" and event["tier"] == "peer":
                newest[event["node"]] = event["newest_step"] or 0
"""


def wait_in_step(script: Path, asked: Path, events: Path) -> None:
    """Have the script wait, in the step whose number is in `asked`, until peers of both nodes have what they can have.

    The snapshot of the step before is not complete as long as this step has not begun.
    """
    loop, text = "for step in run.steps(args.steps):\n", script.read_text()
    waits = _WAITS.format(asked=str(asked), events=str(events))
    text = text.replace("\nfrom hyperpod_ext", f"\nimport json, os, time\n{waits}\n\nfrom hyperpod_ext", 1)
    script.write_text(text.replace(loop, f"{loop}        wait_for_copies(step)\n"))


@pytest.mark.slow
@pytest.mark.thorough
def test_corrupted_memory_is_refused_when_it_is_needed_and_a_peers_copy_is_taken(
    place: LocalPlace, root: Path, tmp_path: Path
) -> None:
    """Shards that nobody else holds: once its rank is dead, they are in its memory, flipped, and on the other node."""
    for name in ("job.yaml", "train.py"):
        shutil.copy(root / "examples" / "03-sharded" / name, tmp_path)
    tiers = [{"kind": "memory", "every_steps": 1}, {"kind": "peer", "every_steps": 1, "max_slowdown": 1.0}]
    arguments = ["--steps", "120", "--width", "32", "--layers", "1", "--replicas", "1"]
    events = place.home / "local" / "sharded" / "0001" / "main" / "events.jsonl"
    wait_in_step(tmp_path / "train.py", tmp_path / "asked", events)
    job = start(
        tmp_path / "job.yaml",
        *("--set", f"checkpoint.tiers={json.dumps(tiers)}"),
        *("--set", f"args={json.dumps(arguments)}"),
    )
    until(events, "step")
    with standing_still(events):
        step = max(event["step"] for event in events_in(events, "step")) + 20
        (tmp_path / "asked").write_text(str(step))
        for order in (("--corrupt-memory", "--phase", "forward"), ("--sigkill", "--phase", "backward")):
            assert hp_ext("chaos", "sharded", *order, "--rank", "2", "--step", str(step)).code == 0
    done = job.wait(110)
    assert done.code == 0, done.stderr
    (recovery,) = hp_ext("report", "sharded", "-o", "json").json["recoveries"]
    assert (recovery["fault"]["rank"], recovery["fault"]["step"], recovery["source"]) == (2, step, "peer")
    refused = events_in(events, "restore_failed")
    assert {one["rank"] for one in refused} == {2}
    assert re.search(r"weights equal +yes", done.stdout)
