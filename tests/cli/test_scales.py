"""hp-ext scales"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext

SPEC = """\
name: tiny
script: train.py
nodes: 4
workers_per_node: 8
mode: plain
global_batch_size: 1024
elastic:
  min_nodes: 2
  max_nodes: 12
  step: 2
  batch:
    micro_batch_size: 4
    learning_rate: sqrt
    scale_config:
      - nodes: 12
        global_batch_size: 1536
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(SPEC)
    return str(tmp_path / "job.yaml")


def test_scales_are_shown_with_the_operators_values(spec: str) -> None:
    done = hp_ext("scales", "-f", spec)
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[0] == "NODES"
    assert lines[5].split() == ["10", "80", "1024", "256", "x", "4", "4", "64", "80.0%", "x", "1"]
    assert lines[6].split() == ["12", "96", "1536", "384", "x", "4", "4", "0", "100.0%", "x", "1.22"]
    assert lines[-1] == "replicaDiscreteValues: [2, 4, 8, 12]"


def test_scales_as_json(spec: str) -> None:
    found = hp_ext("scales", "-f", spec, "--nodes", "1-3,5", "--micro-batch-size", "1", "-o", "json").json
    assert [one["nodes"] for one in found["scales"]] == [1, 2, 3, 5]
    assert found["scales"][2]["efficiency"] == pytest.approx(1024 / (24 * 43))
    assert found["replicaDiscreteValues"] == [1, 2, 3, 5]


def test_a_spec_that_says_too_little_is_told_all_it_lacks(spec: str) -> None:
    Path(spec).write_text("name: tiny\nscript: train.py\n")
    done = hp_ext("scales", "-f", spec)
    assert done.code == 3
    assert [line.split(": ")[2] for line in done.stderr.splitlines()] == [
        "global_batch_size",
        "elastic.batch.micro_batch_size",
        "elastic",
    ]


@pytest.mark.parametrize("nodes", ["", "0", "2-", "a", "1,,2"])
def test_wrong_numbers_of_nodes_are_wrong_usage(spec: str, nodes: str) -> None:
    assert hp_ext("scales", "-f", spec, "--nodes", nodes).code == 2


def test_a_micro_batch_that_does_not_divide_is_told(spec: str) -> None:
    done = hp_ext("scales", "-f", spec, "--micro-batch-size", "3", "--nodes", "2")
    assert done.code == 3
    assert "global_batch_size 1024 is not a multiple of micro_batch_size" in done.stderr


def test_validate_takes_a_batch_that_only_micro_batches_divide(spec: str) -> None:
    assert hp_ext("validate", spec, "--set", "nodes=3").code == 0
    without = Path(spec).with_name("without.yaml")
    without.write_text(SPEC.replace("    micro_batch_size: 4\n", ""))
    assert "[HPX003]" in hp_ext("validate", str(without), "--set", "nodes=3").stderr
    done = hp_ext("validate", spec, "--set", "elastic.batch.micro_batch_size=3")
    assert done.code == 3
    assert "elastic.batch.micro_batch_size: global_batch_size 1024 is not" in done.stderr
    assert "[HPX010]" in done.stderr


def test_nothing_efficient_is_said(spec: str) -> None:
    done = hp_ext("scales", "-f", spec, "--nodes", "11", "--at-least", "99")
    assert done.code == 0
    assert "no number of nodes is 99 % efficient" in done.stderr
