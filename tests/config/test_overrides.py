"""`--set path=value` changes the document before it is checked."""

from __future__ import annotations

import pytest

from hyperpod_ext.config.checkpoint import MemoryTier, PeerTier
from hyperpod_ext.config.files.load import load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem

SPEC = """\
name: a
script: t.py
args: [--steps, "40"]
nodes: 2
checkpoint:
  tiers:
    - kind: memory
    - kind: peer
"""


def loaded(*overrides: str) -> JobConfig:
    return load_text(JobConfig, SPEC, "job.yaml", overrides)


def problem_with(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


def test_values_are_read_as_yaml() -> None:
    job = loaded("nodes=3", "args=[x]", "env.A='1'", "image=", "seed=7")
    assert (job.nodes, job.args, job.env, job.image, job.seed) == (3, ("x",), {"A": "1"}, None, 7)


def test_list_items_are_reached_by_number_and_one_can_be_appended() -> None:
    job = loaded("args.1='5'", "args.2=--fast", "checkpoint.tiers.1.every_steps=3")
    assert job.args == ("--steps", "5", "--fast")
    assert job.checkpoint.tiers == (MemoryTier(), PeerTier(every_steps=3))


def test_what_is_missing_on_the_way_is_made() -> None:
    job = loaded("chaos.faults.0={rank: 1, step: 2}", "restart.max_restarts=1")
    assert job.chaos is not None
    assert (job.chaos.faults[0].rank, job.restart.max_restarts) == (1, 1)


def test_the_last_of_two_wins() -> None:
    assert loaded("nodes=3", "nodes=4").nodes == 4


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("nodez=3", "nodez", "did you mean `nodes`?"),
        ("nodes=x", "nodes", "write digits only"),
        ("env.A=1", "env.A", """write --set 'env.A="1"'"""),
        ("env.A=true", "env.A", """write --set 'env.A="true"'"""),
        ("args.0=2.50", "args.0", """write --set 'args.0="2.50"'"""),
        ("args=--lr 3", "args", """write --set 'args=["--lr", "3"]'"""),
        ("args=it's 3", "args", """write --set 'args=["it'"'"'s 3"]'"""),
        ("checkpoint.tiers.1.replicas=2", "checkpoint.tiers.1.replicas", "at most 1"),
        ("args.5=x", "args.5", "write args.2 to append an item"),
        ("name.first=x", "name.first", "write --set name=VALUE"),
        ("nodes", "", "write --set nodes=2"),
        ("=3", "", "write --set nodes=2"),
        ("args=[1", "", "add the missing `]`"),
    ],
)
def test_a_problem_in_an_override_names_the_option(override: str, path: str, hint: str) -> None:
    problem = problem_with(override)
    assert (problem.source, problem.path) == (f"--set {override}", path)
    assert hint in problem.hint


def test_a_mistake_in_the_file_still_names_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(JobConfig, SPEC + "seed: x\n", "job.yaml", ["nodes=0"])
    assert [problem.source for problem in caught.value.problems] == ["job.yaml", "--set nodes=0"]


def test_an_override_can_mend_the_file() -> None:
    assert load_text(JobConfig, "name: A B\nscript: t.py\n", overrides=["name=a-b"]).name == "a-b"
