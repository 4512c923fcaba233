"""hp-ext plan: sizes, intervals, goodput and dollars of a job, before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext
from made_events import entry

SPEC = """\
name: big
script: train.py
nodes: 64
workers_per_node: 8
resources: {instance_type: ml.p5.48xlarge}
checkpoint:
  tiers:
    - {kind: memory, every_steps: 10}
    - {kind: peer, every_steps: 50, replicas: 1}
    - {kind: s3, uri: "s3://bucket/runs", every_steps: 500}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "job.yaml"
    file.write_text(SPEC)
    return file


def test_a_model_is_enough_to_plan_with() -> None:
    found = hp_ext("plan", "--model", "llama3-70b", "--nodes", "64", "-o", "json").json
    assert found["state"]["parameters"] == 70_553_706_496
    assert found["state"]["gb"] == 987.75
    assert found["state"]["gib"] == 919.92
    tiers = {tier["tier"]: tier for tier in found["plan"]["tiers"]}
    assert list(tiers) == ["memory", "peer", "durable"]
    assert tiers["peer"]["every_steps"] % tiers["memory"]["every_steps"] == 0
    assert tiers["durable"]["every_steps"] % tiers["peer"]["every_steps"] == 0
    assert 0.99 < found["plan"]["goodput"] < 1
    assert found["without"]["every fault restarts the job"]["goodput"] < found["plan"]["goodput"]
    assert found["as_written"] is None
    assert any("419 unexpected interruptions" in note for note in found["notes"])


def test_a_spec_is_compared_with_the_best_intervals(spec: Path) -> None:
    done = hp_ext("plan", "-f", spec, "--model", "llama3-8b", "--step-seconds", "4", "-o", "json")
    found = done.json
    assert [tier["every_steps"] for tier in found["as_written"]["tiers"]] == [10, 50, 500]
    assert found["as_written"]["goodput"] < found["plan"]["goodput"]
    assert found["plan"]["usd_lost"]["a_month"] < found["as_written"]["usd_lost"]["a_month"]
    assert found["step_s"] == 4.0
    assert found["memory_per_node_bytes"] == pytest.approx(found["state"]["bytes"] / 64 * 7, rel=1e-6)
    used = [part for change in found["set"] for part in ("--set", change)]
    again = hp_ext("plan", "-f", spec, "--model", "llama3-8b", "--step-seconds", "4", *used, "-o", "json").json
    assert again["as_written"]["goodput"] == found["plan"]["goodput"]
    changed = hp_ext("plan", "-f", spec, "--set", "nodes=128", "--params", "8B", "-o", "json").json
    assert changed["nodes"] == 128


def test_auto_is_planned_for(spec: Path) -> None:
    spec.write_text(SPEC.replace("every_steps: 500", "every_steps: auto"))
    found = hp_ext("plan", "-f", spec, "--params", "8B", "-o", "json").json
    assert found["as_written"] is None
    assert found["set"][2].startswith("checkpoint.tiers.2.every_steps=")


def test_people_read_a_table(spec: Path) -> None:
    text = hp_ext("plan", "-f", spec, "--model", "llama3-70b", "--usd-per-node-hour", "60").stdout
    assert "987.75 GB (919.92 GiB), llama3-70b: 70,553,706,496 parameters, 14 bytes each" in text
    assert "the spec's intervals" in text
    assert "every fault restarts the job" in text
    assert "$ a month" in text
    assert "correlated, second loss" in text
    assert "steps of 10 s: assumed" in text
    assert "to use these intervals: --set checkpoint.tiers.0.every_steps=" in text


def test_dollars_follow_the_price_that_is_given(spec: Path) -> None:
    cheap, dear = (
        hp_ext("plan", "-f", spec, "--params", "8B", "--usd-per-node-hour", price, "-o", "json").json["plan"]
        for price in ("10", "20")
    )
    assert dear["usd_lost"]["a_month"] == pytest.approx(2 * cheap["usd_lost"]["a_month"], abs=0.02)
    unknown = hp_ext("plan", "--model", "gpt2", "--nodes", "2", "-o", "json").json
    assert "usd_lost" not in unknown["plan"]


def test_parity_takes_less_memory_and_says_how_long_a_lost_node_takes_to_rebuild(spec: Path) -> None:
    size = ["--params", "8B", "--nodes", "8"]
    copies = hp_ext("plan", "-f", spec, *size, "-o", "json").json
    text = spec.read_text()
    assert "kind: peer" in text
    spec.write_text(text.replace("kind: peer", "kind: peer, parity: 4", 1).replace("nodes: 2", "nodes: 8"))
    parity = hp_ext("plan", "-f", spec, *size, "-o", "json").json
    node = parity["state"]["bytes"] / 8
    less = copies["memory_per_node_bytes"] - parity["memory_per_node_bytes"]
    assert less == pytest.approx((2 - 2 / 3) * node, rel=1e-6)
    assert any("from the other 3 nodes of its parity group" in note for note in parity["notes"])


def test_state_that_does_not_fit_is_said(spec: Path) -> None:
    done = hp_ext("plan", "-f", spec, "--model", "llama3.1-405b", "--replicated", "-o", "json")
    assert done.code == 0
    assert "the memory tier needs" in done.stderr
    assert [warning.partition(" ")[0] for warning in done.json["warnings"]] == ["the", "each"]


def history(folder: Path, *more: str) -> Path:
    file = folder / "events.jsonl"
    start = [entry(0.0, "job_started", nodes=2)]
    steps = [entry(3.0 * (i + 1), "step", step=i, began=3.0 * i) for i in range(1200)]
    file.write_text("".join(json.dumps(event) + "\n" for event in [*start, *steps]) + "".join(more))
    return file


def test_a_history_without_a_fault_says_how_sure_it_is(spec: Path, tmp_path: Path) -> None:
    done = hp_ext("plan", "-f", spec, "--params", "1B", "--history", history(tmp_path), "-o", "json")
    found = done.json
    assert found["step_s"] == 3.0
    assert found["failures_a_day"] == pytest.approx(3 * 0.5 * 64 * 12, rel=1e-6)
    assert (
        "process failures: 0 in 2 node hours, which is 0 to 44.3 per node and day (95 % confidence)" in found["notes"]
    )
    assert "NaN" not in done.stdout


def test_a_history_that_was_cut_off_is_used_and_said(tmp_path: Path) -> None:
    file = history(tmp_path, '{"t": 3601')
    done = hp_ext("plan", "--model", "gpt2", "--nodes", "2", "--history", file)
    assert done.code == 0
    assert "events.jsonl:1202: the last line is cut off; it was left out" in done.stderr


@pytest.mark.parametrize(
    ("more", "nodes", "why"),
    [
        ([], 4, "4 nodes: the fewest that hold the state in half of 8 x 80 GiB each; change it with --nodes"),
        (["--instance-type", "ml.p4d.24xlarge"], 8, "in half of 8 x 40 GiB each"),
        (["--ranks-per-copy", "12"], 3, "3 nodes: the fewest that hold one copy"),
        (["--format", "weights"], 1, "1 node: the fewest"),
        (["--nodes", "3"], 3, None),
    ],
)
def test_a_model_alone_is_enough_of_a_question(more: list[str], nodes: int, why: str | None) -> None:
    found = hp_ext("plan", "--model", "llama3-70b", *more, "-o", "json").json
    assert found["nodes"] == nodes
    assert any("the fewest" in note for note in found["notes"]) == (why is not None)
    assert why is None or any(why in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--nodes", "4"], 2, "Give the model's size"),
        (["--nodes", "4", "--model", "gpt2", "--params", "1B"], 2, "Give the model's size"),
        (["--nodes", "4", "--model", "gpt3"], 6, "there is no preset of a model 'gpt3'"),
        (["--nodes", "4", "--model", "gpt2", "--format", "int3"], 3, "there is no format 'int3'"),
        (["--nodes", "4", "--model", "gpt2", "--step-seconds", "0"], 2, "is not a number above 0"),
        (["--nodes", "4", "--model", "gpt2", "--mtbf-hours", "nan"], 2, "is not a number above 0"),
        (["--nodes", "4", "--model", "gpt2", "--days", "inf"], 2, "is not a number above 0"),
        (["--nodes", "4", "--model", "gpt2", "--rates", "mine"], 6, "there are no published rates 'mine'"),
        (["--nodes", "4", "--model", "gpt2", "--ranks-per-copy", "7"], 3, "does not divide a world of 32 evenly"),
        (["--nodes", "4", "--model", "gpt2", "--instance-type", "ml.p9.large"], 6, "no instance type 'ml.p9.large'"),
        (["--nodes", "4", "--model", "gpt2", "--history", "nowhere"], 6, "there is no file nowhere"),
        (["--nodes", "4", "--model", "gpt2", "--plot", "plan.gif"], 3, "name a file that ends in .svg or .png"),
        (["--set", "nodes=3", "--model", "gpt2", "--nodes", "3"], 2, "--set changes a field of a spec"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(arguments: list[str], code: int, text: str) -> None:
    done = hp_ext("plan", *arguments)
    assert (done.code, done.stdout) == (code, "")
    assert text in done.stderr


def test_a_history_of_one_event_is_no_history(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(entry(1.0, "job_started", nodes=2)) + "\n")
    done = hp_ext("plan", "--model", "gpt2", "--nodes", "2", "--history", file)
    assert done.code == 3
    assert "no failure rates can be computed" in done.stderr


def test_what_never_fails_is_saved_once() -> None:
    done = hp_ext("plan", "--model", "gpt2", "--nodes", "2", "--mtbf-hours", "inf", "--days", "1", "-o", "json")
    plan = done.json["plan"]
    assert {tier["every_steps"] for tier in plan["tiers"]} == {8640}
    assert plan["failures_a_month"] == 0
    assert plan["lost_steps_a_month"] == 0


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_the_plan_is_drawn(tmp_path: Path, name: str) -> None:
    done = hp_ext("plan", "--model", "gpt2", "--nodes", "8", "--plot", tmp_path / name, "-o", "json")
    assert done.code == 0
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_without_matplotlib_a_plot_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = hp_ext("plan", "--model", "gpt2", "--nodes", "8", "--plot", tmp_path / "plan.svg")
    assert done.code == 6
    assert "pip install matplotlib" in done.stderr
