"""Help, usage errors and the version."""

from __future__ import annotations

import re

import pytest
from command import call_hp_ext as hp_ext

import hyperpod_ext

COMMANDS = {
    "Jobs": "init validate render diff create-job run wait list status logs cancel resize move chaos import",
    "Jobs on a cluster": "describe exec port-forward delete",
    "Before a job": "plan simulate scales",
    "What happens to a job": "report top dashboards",
    "Checkpoints and data": "checkpoints data",
    "Clusters": "create-cluster update-cluster cluster node",
    "Reference": "schema explain instances templates doctor completion",
}


def test_help_lists_every_command() -> None:
    text = hp_ext("--help").stdout
    tables = {heading: text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0] for heading in COMMANDS}
    # what is further to the right goes on from the line above
    rows = {heading: re.findall(r"^  (\S+)", table, re.MULTILINE) for heading, table in tables.items()}
    assert {heading: " ".join(names) for heading, names in rows.items()} == COMMANDS


@pytest.mark.parametrize("command", " ".join(COMMANDS.values()).split())
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    done = hp_ext(command, "--help")
    assert done.code == 0
    assert f"  hp-ext {command}" in done.stdout.partition("Example")[2]


@pytest.mark.parametrize("arguments", [["statsu"], ["status", "--nope"], ["logs"], ["create-job", "-o", "xml"]])
def test_wrong_usage_exits_2_with_nothing_on_stdout(arguments: list[str]) -> None:
    done = hp_ext(*arguments)
    assert (done.code, done.stdout) == (2, "")


def test_a_misspelt_command_names_the_nearest() -> None:
    assert "Did you mean 'status'?" in hp_ext("statsu").stderr


def test_the_version_is_the_packages() -> None:
    assert hp_ext("--version").stdout == f"hp-ext, version {hyperpod_ext.__version__}\n"
