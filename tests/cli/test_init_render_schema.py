"""hp-ext init, render and schema"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command import HP_EXT, check_output
from command import call_hp_ext as hp_ext
from hyperpod_ext.cli.outputs.schemas import OUTPUTS
from made_events import entry
from pydantic import ValidationError

from hyperpod_ext import cli
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.ipc.declared import name_of


def test_init_writes_a_job_that_is_valid(tmp_path: Path) -> None:
    done = hp_ext("init", "new/job", "--name", "my-job", cwd=tmp_path)
    assert done.stdout.split() == ["new/job/job.yaml", "new/job/train.py", "new/job/job.schema.json"]
    assert "create-job -f new/job/job.yaml" in done.stderr
    folder = tmp_path / "new" / "job"
    assert hp_ext("validate", folder / "job.yaml", "--target", "local", "-o", "json").json["name"] == "my-job"
    assert (folder / "job.schema.json").read_text() == hp_ext("schema").stdout
    assert (folder / "job.yaml").read_text().startswith("# yaml-language-server: $schema=job.schema.json\n")


def test_init_writes_the_example(tmp_path: Path, root: Path) -> None:
    hp_ext("init", tmp_path)
    example = root / "examples" / "01-local"
    assert (tmp_path / "train.py").read_text() == (example / "train.py").read_text()
    written = (tmp_path / "job.yaml").read_text()
    assert written.replace("=job.schema", "=../job.schema", 1) == (example / "job.yaml").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_init_writes_a_job_for_each_target_that_can_be_submitted_there(target: str, tmp_path: Path) -> None:
    done = hp_ext("init", tmp_path, "--target", target)
    assert (done.code, f"--target {target}" in done.stderr) == (0, True)
    job = tmp_path / "job.yaml"
    assert not {"chaos", "rehears"} & set(job.read_text().replace(":", " ").split())
    assert hp_ext("validate", job, "--target", target, "--strict").code == 0
    assert hp_ext("create-job", "-f", job, "--target", target, "--dry-run").code == 0


def test_init_refuses_a_target_that_there_is_not(tmp_path: Path) -> None:
    done = hp_ext("init", tmp_path / "new", "--target", "hyperpod")
    assert (done.code, (tmp_path / "new").exists()) == (3, False)
    assert "hyperpod-eks" in done.stderr


@pytest.mark.parametrize("command", ["init", "validate", "render", "diff", "create-job", "list", "status", "logs"])
def test_targets_are_listed_in_help_and_completed(command: str) -> None:
    assert "[local|hyperpod-eks|kubeflow|hyperpod-slurm|sagemaker]" in hp_ext(command, "--help").stdout
    completing = {
        "COMP_WORDS": f"hp-ext {command} --target hyper",
        "COMP_CWORD": "3",
        "_HP_EXT_COMPLETE": "bash_complete",
    }
    done = subprocess.run([HP_EXT], env=os.environ | completing, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plain,hyperpod-eks", "plain,hyperpod-slurm"]


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    done = hp_ext("init", tmp_path)
    assert done.code == 5
    assert "has train.py already" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_init_refuses_a_name_that_does_not_fit_and_takes_one_of_digits(tmp_path: Path) -> None:
    done = hp_ext("init", tmp_path / "a", "--name", "My Job")
    assert done.code == 3
    assert "for example `my-job`" in done.stderr
    assert not (tmp_path / "a").exists()
    assert hp_ext("init", tmp_path, "--name", "12").code == 0
    assert hp_ext("validate", tmp_path / "job.yaml").code == 0


def test_render_shows_and_writes_the_same_bytes(tmp_path: Path, root: Path) -> None:
    example = root / "examples" / "01-local"
    wanted = (example / "rendered" / "local" / "node.sh").read_text()
    assert hp_ext("render", "-f", example / "job.yaml", "--target", "local").stdout == wanted
    done = hp_ext("render", "-f", example / "job.yaml", "--out", tmp_path / "out")
    assert done.stdout == f"{tmp_path}/out/node.sh\n"
    assert (tmp_path / "out" / "node.sh").read_text() == wanted
    assert hp_ext("render", example / "job.yaml", "-o", "json").json["files"]["node.sh"] == wanted


def test_schema_prints_one_for_each_spec() -> None:
    assert hp_ext("schema").json["title"] == "JobConfig"
    assert hp_ext("schema", "cluster").json["title"] == "ClusterConfig"


def with_json(group: click.Group, before: str = "") -> Iterator[str]:
    """Commands that take `-o json`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from with_json(command, f"{name} ")
        elif any(isinstance(one.type, click.Choice) and "json" in one.type.choices for one in command.params):
            yield before + name


def test_every_command_with_json_output_has_a_schema() -> None:
    assert sorted([*with_json(cli.hp_ext), "error"]) == sorted(OUTPUTS)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("templates", "list", "-o", "json"), "[1]"),
        (("exec", "--dry-run", "-o", "json"), '{"command": [], "more": 1}'),
        (("status", "--output", "json"), '{"error": {"code": "ConfigError", "message": "m"}}'),
        (
            ("scales", "-o", "json"),
            '{"file": "a", "at_least": "0.9", "scales": [], "replicaDiscreteValues": []}',
        ),
    ],
)
def test_an_output_unlike_its_schema_fails_the_test_that_made_it(words: tuple[str, ...], output: str) -> None:
    with pytest.raises(ValidationError):
        check_output(words, output)


def test_resizes_and_moves_are_as_their_schemas_say() -> None:
    resized = entry(1.0, "resized")
    of_slurm = {"given_back": ["hpx2"], "kept": ["hpx1"], "why_kept": "the batch script runs on it"}
    check_output(("resize", "-o", "json"), json.dumps(resized | of_slurm))
    check_output(("move", "-o", "json"), json.dumps({"node": 1, "to": 2, **resized, "drain": "hpx2"}))


def test_outputs_and_event_log_have_published_schemas() -> None:
    for name in OUTPUTS:
        schema = hp_ext("schema", *name.split()).json
        assert schema["title"] == ("error" if name == "error" else f"hp-ext {name} -o json")
        assert '"additionalProperties": false' not in json.dumps(schema)
    assert "mistake" in hp_ext("schema", "error").json["$defs"]["ErrorDetails"]["properties"]["problems"]["description"]
    assert (
        "machines"
        in hp_ext("schema", "cluster", "diff").json["$defs"]["ResourceChanged"]["properties"]["breaks"]["description"]
    )
    schema = hp_ext("schema", "event").json
    kinds = {
        each["properties"]["event"]["const"]: each for each in schema["$defs"].values() if "event" in each["properties"]
    }
    assert kinds.keys() == {name_of(kind, "event") for kind in KINDS}
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    for name in kinds:
        validator.validate(json.loads(json.dumps(entry(1.0, name))))
    assert not validator.is_valid({"t": 1.0, "event": "step", "rank": "first"})


def test_a_place_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").touch()
    for arguments in (["init", tmp_path / "file" / "job"], ["render", root / "examples/01-local/job.yaml", "--out"]):
        done = hp_ext(*arguments, *([tmp_path / "file" / "out"] if arguments[-1] == "--out" else []))
        assert (done.code, done.stdout) == (1, "")
        assert str(tmp_path / "file") in done.stderr


@pytest.mark.parametrize("command", [("render",), ("create-job", "--dry-run"), ("validate",)])
def test_a_warning_names_file_and_line_whoever_gives_it(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\nimage: repo/train\n")
    said = hp_ext(*command, "-f", tmp_path / "job.yaml", "--target", "hyperpod-eks").stderr
    assert f"warning: {tmp_path}/job.yaml:3: image: without a tag, a node that joins later" in said
