"""hp-ext simulate: a job through failures that are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext

JOB = ["--model", "llama3-70b", "--nodes", "16", "--step-seconds", "5", "--mtbf-hours", "500", "--days", "10"]


def test_goodput_comes_with_its_confidence_and_beside_the_planners() -> None:
    found = hp_ext("simulate", *JOB, "-o", "json").json
    assert len(found["each"]) == 10
    goodput = found["goodput"]
    assert 0 < goodput["margin_95"] < 0.01
    assert goodput["mean"] == pytest.approx(found["planner"], abs=0.005 + goodput["margin_95"])
    assert goodput["mean"] == pytest.approx(sum(one["goodput"] for one in found["each"]) / 10, abs=1e-5)


def test_the_same_seed_says_the_same() -> None:
    first, again, other = (
        hp_ext("simulate", *JOB, "--runs", "2", "--seed", seed, "-o", "json").stdout for seed in ("7", "7", "8")
    )
    assert first == again != other


def test_people_read_where_the_time_went() -> None:
    text = hp_ext("simulate", *JOB, "--runs", "2").stdout
    assert "2 x 10 days of 16 nodes, 1 spares" in text
    assert "restored from" in text
    assert "the planner expects" in text


def test_a_job_with_parity_is_simulated_with_it(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    (tmp_path / "train.py").touch()
    tiers = "[{kind: memory}, {kind: peer, parity: 4}]"
    spec.write_text(f"name: a\nscript: train.py\nnodes: 4\ncheckpoint: {{tiers: {tiers}}}\n")
    found = hp_ext("simulate", "-f", spec, "--params", "1B", "--runs", "1", "--mtbf-hours", "50", "-o", "json").json
    assert found["each"][0]["fell_back_to"]["parity"] > 0
    assert "peer" not in found["each"][0]["sources"]


@pytest.mark.parametrize(
    ("more", "spares"),
    [
        ("nodes: 64, spares: 8", 8),
        ("nodes: 64, node_groups: [{name: a, nodes: 60, spares: 3}, {name: b, nodes: 4}]", 3),
        ("nodes: 64", 0),
    ],
)
def test_spares_are_the_specs(tmp_path: Path, more: str, spares: int) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"{{name: a, script: train.py, {more}}}")
    found = hp_ext(
        "simulate", "-f", tmp_path / "job.yaml", "--params", "1B", "--runs", "1", "--days", "1", "-o", "json"
    )
    assert found.json["spares"] == spares
    asked = hp_ext(
        "simulate",
        "-f",
        tmp_path / "job.yaml",
        "--params",
        "1B",
        "--runs",
        "1",
        "--days",
        "1",
        "--spares",
        "0",
        "-o",
        "json",
    )
    assert asked.json["spares"] == 0


def test_one_run_has_no_confidence_interval() -> None:
    found = hp_ext("simulate", *JOB, "--runs", "1", "-o", "json").json
    assert found["goodput"]["margin_95"] is None


def test_all_ranks_decide_what_some_do() -> None:
    some, every = (
        hp_ext("simulate", *JOB, "--runs", "1", *more, "-o", "json").json["each"] for more in ([], ["--whole"])
    )
    assert some == every


def test_nothing_fails_where_nothing_is_drawn() -> None:
    calm = [*JOB[:-4], "--mtbf-hours", "inf", "--days", "2", "--runs", "1", "-o", "json"]
    (one,) = hp_ext("simulate", *calm).json["each"]
    assert (one["lost_steps"], sum(one["faults"].values()), one["seconds"]["recovery"]) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("more", "text"),
    [(["--runs", "0"], "--runs"), (["--repair-hours", "-1"], "above 0"), (["--rack-nodes", "0"], "rack")],
)
def test_wrong_numbers_are_refused(more: list[str], text: str) -> None:
    done = hp_ext("simulate", *JOB, *more)
    assert (done.code, done.stdout) == (2, "")
    assert text in done.stderr
