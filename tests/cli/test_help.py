"""Help, usage errors and the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext
from local_place import LocalPlace

import hyperpod_ext

COMMANDS = {
    "Jobs": "init validate render diff create-job run wait list status logs cancel resize move chaos import",
    "Jobs on a cluster": "describe exec port-forward delete",
    "Before a job": "plan simulate scales",
    "What happens to a job": "report top dashboards",
    "Checkpoints and data": "checkpoints data",
    "Clusters": "cluster node",
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


@pytest.mark.parametrize(
    ("word", "command"),
    [("submit", "create-job"), ("ps", "list"), ("get", "list"), ("stop", "cancel"), ("kill", "cancel")],
)
def test_a_word_of_another_tool_names_the_command(word: str, command: str) -> None:
    done = hp_ext(word, "job.yaml")
    assert (done.code, f"Did you mean '{command}'?" in done.stderr) == (2, True)


def test_run_names_the_command_for_a_spec(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    done = hp_ext("run", "job.yaml", cwd=tmp_path)
    assert (done.code, "hp-ext create-job -f job.yaml" in done.stderr) == (2, True)


@pytest.mark.parametrize("verb", ["create", "update"])
def test_the_old_names_of_moved_commands_still_work(verb: str) -> None:
    old, new = hp_ext(f"{verb}-cluster", "-f", "nothing.yaml"), hp_ext("cluster", verb, "-f", "nothing.yaml")
    assert (old.code, old.stderr) == (6, new.stderr)
    assert f"{verb}-cluster" not in hp_ext("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["statsu"],
        ["logs"],
        ["status", "--nope"],
        ["status", "nobody"],
        ["validate", "nothing.yaml"],
        ["list", "--target=x"],
    ],
)
def test_all_errors_and_hints_have_one_prefix(place: LocalPlace, arguments: list[str]) -> None:
    lines = [line for line in hp_ext(*arguments).stderr.splitlines() if not line.startswith("Usage: ")]
    assert [line.partition(": ")[0] for line in lines] in (["error", "hint"], ["error"])


def test_problems_of_a_spec_have_the_prefix_of_errors(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("nodez: 2\nscript: train.py\n")
    *problems, last = hp_ext("validate", "job.yaml", cwd=tmp_path).stderr.splitlines()
    assert [line.startswith("error: job.yaml:") for line in problems] == [True, True, True]
    assert last.startswith("hint: ")


def test_without_a_command_the_help_is_shown() -> None:
    done = hp_ext()
    assert (done.stdout + done.stderr).startswith("Usage: hp-ext [OPTIONS] COMMAND")


def test_the_version_is_the_packages() -> None:
    assert hp_ext("--version").stdout == f"hp-ext, version {hyperpod_ext.__version__}\n"
