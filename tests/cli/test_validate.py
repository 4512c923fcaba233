"""hp-ext validate"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from command import HP_EXT
from command import call_hp_ext as hp_ext

FIVE_MISTAKES = """\
name: tiny-gpt
script: trian.py
workers_per_nod: 2
nodes: "2"
global_batch_size: 15
checkpoint:
  tiers:
    - kind: memroy
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nscript: train.py\nnodes: 2\n")
    return file


def test_a_valid_spec_is_said_to_be_valid(spec: Path) -> None:
    done = hp_ext("validate", "-f", spec)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"{spec}: valid (a: 2 nodes x 1 worker = 2 ranks)\n"
    assert hp_ext("validate", spec, "-o", "json").json["world_size"] == 2
    assert yaml.safe_load(hp_ext("validate", spec, "-o", "yaml").stdout)["valid"] is True


def test_five_mistakes_are_five_lines_with_suggestions_and_exit_3(spec: Path) -> None:
    spec.write_text(FIVE_MISTAKES)
    done = hp_ext("validate", spec)
    assert (done.code, done.stdout) == (3, "")
    *lines, last = done.stderr.splitlines()
    assert last == MORE
    assert [line.removeprefix(f"error: {spec}:").split(":")[0] for line in lines] == ["2", "3", "4", "5", "8"]
    wanted = ["`train.py`?", "`workers_per_node`?", "2 without quotes", "write 12 or 16", "`memory`?"]
    assert all(hint in line for hint, line in zip(wanted, lines, strict=True)), done.stderr


MORE = "hint: Fix these first; some checks could not run."
ELASTIC = "elastic: {min_nodes: 5, max_nodes: 3}\n"


@pytest.mark.parametrize("mistake", ["nodez: 4", "workers_per_node: two", "checkpoint: {tiers: [{kind: disk}]}"])
def test_bounds_that_contradict_each_other_are_told_beside_other_mistakes(spec: Path, mistake: str) -> None:
    spec.write_text(f"name: a\nscript: train.py\n{mistake}\n{ELASTIC}")
    lines = [line for line in hp_ext("validate", spec).stderr.splitlines() if line != MORE]
    assert [line.removeprefix(f"error: {spec}:")[:1] for line in lines] == ["3", "4"]
    assert lines[1].endswith("elastic.min_nodes: 5 is more than max_nodes (exchange min_nodes and max_nodes) [HPX103]")
    ignoring = hp_ext("validate", spec, "--ignore", "HPX103").stderr.splitlines()
    assert len([line for line in ignoring if line != MORE]) == 1


def test_nothing_is_concluded_from_bounds_that_cannot_be_read(spec: Path) -> None:
    spec.write_text("name: a\nscript: train.py\nelastic: {min_nodes: five, max_nodes: 3, sizes: [4, 2]}\n")
    line, last = hp_ext("validate", spec).stderr.splitlines()
    assert last == MORE
    assert line.startswith(f"error: {spec}:3: elastic.min_nodes: must be a whole number")


def test_a_cluster_with_mistakes_hides_none_of_the_job(spec: Path, tmp_path: Path) -> None:
    spec.write_text(f"name: a\nscript: train.py\n{ELASTIC}")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("name: c\nregion: nowhere\n")
    done = hp_ext("validate", spec, "--cluster", cluster)
    assert f"{spec}:3: elastic.min_nodes: 5 is more than max_nodes" in done.stderr
    assert f"{cluster}:2: region" in done.stderr


def test_under_json_the_problems_are_on_stdout(spec: Path) -> None:
    spec.write_text(FIVE_MISTAKES)
    error = hp_ext("validate", spec, "-o", "json").json["error"]
    assert (error["code"], error["exit_code"], len(error["problems"])) == ("ConfigError", 3, 5)
    assert error["problems"][1] == {
        "message": "is not a known field",
        "path": "workers_per_nod",
        "source": str(spec),
        "line": 3,
        "hint": "did you mean `workers_per_node`?",
        "rule": "",
    }


def test_options_change_fields_and_are_named_in_problems(spec: Path) -> None:
    assert "4 ranks" in hp_ext("validate", spec, "--set", "nodes=4").stdout
    assert "--set nodes=0: nodes" in hp_ext("validate", spec, "--set", "nodes=0").stderr


def test_a_target_that_has_every_tier_refuses_none(spec: Path) -> None:
    tiers = "[{kind: memory}, {kind: peer}, {kind: file, path: /x}, {kind: s3, uri: s3://bucket/a}]"
    spec.write_text(spec.read_text() + f"checkpoint:\n  tiers: {tiers}\n")
    assert hp_ext("validate", spec, "--target", "local").code == 0


def test_a_cluster_that_is_too_small_is_refused(spec: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    group = "{name: g, instance_type: ml.p5.48xlarge, count: 2, spares: 1}"
    cluster.write_text(f"name: c\nregion: us-west-2\ninstance_groups:\n  - {group}\n")
    done = hp_ext("validate", spec, "--cluster", cluster)
    assert done.code == 3
    assert f"{spec}:3: nodes: the job needs 2 nodes, but cluster c has only 1, not counting spares" in done.stderr
    spec.write_text("name: A\nscript: train.py\n")
    cluster.write_text("name: c\nregion: nowhere\n")
    done = hp_ext("validate", spec, "--cluster", cluster)
    assert f"{spec}:1: name" in done.stderr
    assert f"{cluster}:2: region" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "Name one spec"),
        (["job.yaml", "-f", "job.yaml"], 2, "Name one spec"),
        (["jobs.yaml"], 6, "did you mean job.yaml"),
        (["job.yaml", "--target", "locale"], 3, "did you mean `local`"),
        (["job.yaml", "--target", "sagemaker"], 3, "resources.instance_type"),
    ],
)
def test_other_mistakes_have_their_own_exit_codes(spec: Path, arguments: list[str], code: int, text: str) -> None:
    done = hp_ext("validate", *arguments, cwd=spec.parent)
    assert (done.code, done.stdout) == (code, "")
    assert text in done.stderr


def test_a_spec_without_an_end_is_refused_at_once(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large.yaml"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for file_, words in ((Path("/dev/zero"), "regular file"), (pipe, "regular file"), (large, "larger than 1 MiB")):
        for command in (["validate"], ["cluster", "create", "--dry-run"], ["create-job", "--dry-run"]):
            done = hp_ext(*command, "-f", file_)
            assert (done.code, words in done.stderr) == (3, True), done.stderr
    for source in ("-", "/dev/stdin"):
        with Path("/dev/zero").open("rb") as endless:
            done_ = subprocess.run([HP_EXT, "validate", "-f", source], stdin=endless, capture_output=True, check=False)
        assert (done_.returncode, b"larger than 1 MiB" in done_.stderr) == (3, True), done_.stderr


def test_a_file_to_import_without_an_end_is_refused_at_once(spec: Path) -> None:
    pipe, large = spec.parent / "pipe", spec.parent / "large.yaml"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for endless, words in (("/dev/zero", "regular file"), (pipe, "regular file"), (large, "larger than")):
        for command in (
            ["import", endless],
            ["import", spec, "--values", endless],
            ["import", spec, "--env-file", endless],
            ["diff", spec, "--set", "image=a:b", "--target", "kubeflow", "--with", endless],
        ):
            done = hp_ext(*command)
            assert (done.code, words in done.stderr) == (3, True), done.stderr
    with Path("/dev/zero").open("rb") as file:
        run = subprocess.run([HP_EXT, "import", "-"], stdin=file, capture_output=True, check=False)
    assert (run.returncode, b"larger than 4 MiB" in run.stderr) == (3, True), run.stderr


def test_a_spec_that_a_shell_pipes_is_read(spec: Path) -> None:
    line = f"exec {HP_EXT} validate -f <(grep -v script {spec}) --set mode=plain --set 'command=[date]'"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, ": valid" in done.stdout) == (0, True), done.stderr


def test_a_spec_comes_from_the_standard_input(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    spec = "name: a\nscript: train.py\n"
    run = [HP_EXT, "validate", "-"]
    done = subprocess.run(run, input=spec, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "-: valid (a: 1 node x 1 worker = 1 rank)\n")
    done = subprocess.run(run, input="name: a\nnodes: 1e9\n", capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert "-:2: nodes:" in done.stderr


_BROKEN = """\
name: a
script: trian.py
nodez: 4
nodes: 4
workers_per_node: 16
global_batch_size: 13
spares: 1
resources: {instance_type: ml.p5.48xlarge, efa: 64}
kubernetes: {launcher: ours}
mode: plain
"""


def test_a_misspelt_name_keeps_no_other_check_from_running(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(_BROKEN)
    done = hp_ext("validate", tmp_path / "job.yaml", "--target", "hyperpod-eks", "-o", "json")
    error = done.json["error"]
    assert {one["path"] for one in error["problems"]} == {
        *("script", "nodez", "workers_per_node", "global_batch_size", "resources.efa"),
        *("spares", "kubernetes.launcher", "image"),
    }
    assert all(one["source"] and one["line"] for one in error["problems"])
    assert error["hint"] == ""


def test_where_checks_could_not_run_more_may_follow(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(_BROKEN.replace("nodes: 4", "nodes: many"))
    done = hp_ext("validate", tmp_path / "job.yaml", "--target", "hyperpod-eks")
    assert "job.yaml:5: workers_per_node" not in done.stderr  # which is compared with what `nodes` takes
    assert done.stderr.rstrip().endswith(MORE)
    (tmp_path / "job.yaml").write_text(_BROKEN)
    assert MORE not in hp_ext("validate", tmp_path / "job.yaml", "--target", "local").stderr


def test_a_target_that_there_is_not_is_told_once_the_file_is_right(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\nnodez: 1\n")
    done = hp_ext("validate", tmp_path / "job.yaml", "--target", "locale")
    assert (done.code, "nodez" in done.stderr) == (3, True)
