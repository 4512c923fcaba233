"""hp-ext explain, instances, list, templates and completion"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext
from command import hp_ext as run_hp_ext
from local_place import LocalPlace

from hyperpod_ext.catalog.aws_terms import terms
from hyperpod_ext.clusters.checks import all_checks
from hyperpod_ext.config.files.check_texts import TEXTS
from hyperpod_ext.config.files.checks import CHECKS
from hyperpod_ext.config.files.explain import explain
from hyperpod_ext.config.files.schema_path import field_paths
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.rules import all_rules


def test_a_rule_is_explained_with_cause_and_fix() -> None:
    rule = all_rules()["HPX104"]
    assert hp_ext("explain", "hpx104").stdout == f"HPX104 (error): {rule.title}\n\n{rule.cause}\n\n{rule.fix}\n"
    assert hp_ext("explain", "HPX104", "-o", "json").json["fix"] == rule.fix
    listed = [one["id"] for one in hp_ext("explain", "-o", "json").json]
    assert listed == [*TEXTS, *all_rules(), *all_checks()]
    assert {check.rule for checks in CHECKS.values() for check in checks} == set(TEXTS)
    assert hp_ext("explain", "HPX003").stdout.startswith("HPX003 (error): ")


def test_aws_names_are_explained_with_their_counterparts() -> None:
    told = hp_ext("explain", "hpwrapper").stdout
    assert told.startswith("HPWrapper (AWS checkpointless training, tier 3: in-process recovery)")
    assert "`@resilient`" in told
    for name in ("MMAPDataModule", "wait_rank", "CudaHealthCheck", "HPCT_USE_CONN_DATA", "TORCH_SKIP_TCPSTORE"):
        assert [one["name"] for one in hp_ext("explain", name, "-o", "json").json] == [name]
    names = [one["name"] for one in hp_ext("explain", "tier-1", "-o", "json").json]
    assert names == ["HPCT_USE_CONN_DATA", "HPCT_USE_ROOTLESS", "TORCH_SKIP_TCPSTORE"]
    assert hp_ext("explain", "restart.preload", "-o", "json").json["aws_tiers"] == ["tier-4"]
    assert hp_ext("explain", "checkpoint.tiers.uri", "-o", "json").json["aws_tiers"] == ["tier-4"]
    assert hp_ext("explain", "cluster.region", "-o", "json").json["aws_tiers"] == []
    assert "With `compat: aws` (partly): With `checkpoint_manager` (mode `ours`) it is `@resilient`" in told
    for one in terms():
        explain(JobConfig, one.fields[0] if one.fields else "mode")  # the field exists


@pytest.mark.parametrize(
    ("name", "near"), [("HPX999", "HPX2"), ("hpwraper", "HPWrapper"), ("checkpont.tiers", "checkpoint"), ("zzz", "")]
)
def test_a_name_that_is_not_there(name: str, near: str) -> None:
    done = hp_ext("explain", name)
    assert (done.code, done.stdout) == (6, "")
    assert f"did you mean `{near}" in done.stderr if near else "did you mean" not in done.stderr
    assert done.stderr.endswith("`hp-ext explain` lists all\n")


def test_all_names_are_listed() -> None:
    names = hp_ext("explain").stdout.splitlines()[-1]
    assert names.startswith("Fields and AWS names: job, name, ")
    assert {"checkpoint", "cluster", "HPWrapper", "tier-4"} < set(names.split(", "))


@pytest.mark.parametrize("path", [".".join(map(str, path)) for path in field_paths(JobConfig)])
def test_every_field_is_explained(path: str) -> None:
    told = explain(JobConfig, path)
    assert told["path"] == path
    assert told["description"]
    assert told["type"]


def test_fields_in_lists_and_unions_are_found() -> None:
    assert hp_ext("explain", "checkpoint.tiers.0.uri").stdout.startswith("checkpoint.tiers.uri\n\nBucket and prefix")
    assert hp_ext("explain", "job.log_rules.pattern", "-o", "json").json["path"] == "log_rules.pattern"
    assert hp_ext("explain", "cluster.instance_groups.count", "-o", "json").json["path"] == "instance_groups.count"


def test_templates_are_checked_when_they_are_named(tmp_path: Path, root: Path) -> None:
    job, mine, name = root / "examples/04-hyperpod-eks/job.yaml", tmp_path / "mine", "hyperpod_eks/job.yaml.j2"
    asked = ("validate", job, "--target", "hyperpod-eks", "--templates", mine)
    assert hp_ext(*asked).code == 6
    assert hp_ext("templates", "eject", mine, name, "hyperpod_eks/start.sh.j2").code == 0
    assert hp_ext(*asked).code == 0
    assert hp_ext("validate", "--templates", mine, "-o", "json").json["templates"] == [name, "hyperpod_eks/start.sh.j2"]
    template = (mine / name).read_text()
    (mine / name).write_text(template + "\n{% if %}\n")
    for words in (asked, ("validate", "--templates", mine)):
        told = hp_ext(*words, "-o", "json").json["error"]["problems"]
        assert [(one["source"], one["line"]) for one in told] == [(str(mine / name), len(template.splitlines()) + 2)]
    (mine / name).write_text(template + "\nnot: [yaml\n")
    assert hp_ext("validate", job, "--templates", mine).code == 0
    assert hp_ext(*asked).code != 0
    (mine / name).write_text(template + "{{ nothing }}")
    assert hp_ext(*asked).code == 3
    (mine / name).write_text(template)
    (mine / "hyperpod_eks" / "jobs.yaml.j2").write_text("")
    unused = hp_ext(*asked)
    assert (unused.code, "did you mean `hyperpod_eks/job.yaml.j2`?" in unused.stderr) == (3, True)


@pytest.mark.parametrize("command", ["render", "create-job --dry-run", "validate"])
@pytest.mark.parametrize(
    ("folder", "file", "hint"),
    [
        ("mine", "hyperpod-eks/job.yaml.j2", "rename it to hyperpod_eks/job.yaml.j2"),
        ("hyperpod-eks", "job.yaml.j2", "name the parent folder: --templates"),
        ("hyperpod_eks", "job.yaml.j2", "with hyperpod_eks/job.yaml.j2"),
        ("mine", "hyperpod_eks/other.txt", "has no template"),
        ("mine", "hyperpod_eks/job.yaml.j2", "mistyped"),
    ],
)
def test_templates_that_a_submission_refuses_are_refused_before(
    folder: str, file: str, hint: str, command: str, tmp_path: Path, root: Path
) -> None:
    if command == "render" and hint == "mistyped":
        return  # it shows the text that is refused
    template = tmp_path / folder / file
    template.parent.mkdir(parents=True)
    shipped = (root / "templates" / "hyperpod_eks" / "job.yaml.j2").read_text()
    template.write_text(shipped.replace("runPolicy:", "mistyped:"))
    job = root / "examples" / "04-hyperpod-eks" / "job.yaml"
    words = (*command.split(), "-f", job, "--target", "hyperpod-eks", "--templates", tmp_path / folder)
    done = hp_ext(*words)
    assert (done.code, hint in done.stderr) == (3, True), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("target", "field"), [("sagemaker", "ml.p9.huge"), ("hyperpod-slurm", "if")])
def test_a_dry_run_refuses_what_a_submission_refuses(target: str, field: str, tmp_path: Path) -> None:
    assert hp_ext("init", tmp_path, "--target", target).code == 0
    job = tmp_path / "job.yaml"
    more = ["--set", f"resources.instance_type={field}"]
    if target == "hyperpod-slurm":
        more = ["--templates", tmp_path / "mine"]
        assert hp_ext("templates", "eject", tmp_path / "mine", "hyperpod_slurm/job.sbatch.j2").code == 0
        with (tmp_path / "mine" / "hyperpod_slurm" / "job.sbatch.j2").open("a") as file:
            file.write("if true; then\n")
    assert hp_ext("create-job", "-f", job, "--target", target, "--dry-run", *more).code in (1, 3)


def test_templates_are_shown_beside_the_shipped_ones(tmp_path: Path) -> None:
    name, other = "hyperpod_eks/job.yaml.j2", "hyperpod_eks/start.sh.j2"
    assert hp_ext("templates", "eject", tmp_path, name, other).code == 0
    (tmp_path / name).write_text((tmp_path / name).read_text() + "# mine\n")
    shown = hp_ext("templates", "diff", tmp_path)
    assert shown.stdout.startswith(f"--- shipped/{name}\n+++ {tmp_path / name}\n")
    assert (shown.code, shown.stdout.splitlines()[-1], other in shown.stderr) == (0, "+# mine", True)
    listed = {one["name"]: one["diff"] for one in hp_ext("templates", "diff", tmp_path, "-o", "json").json}
    assert (listed[other], "+# mine" in listed[name]) == ("", True)
    assert hp_ext("templates", "diff", tmp_path / "none").code == 6


def test_a_misspelt_field_names_the_nearest() -> None:
    done = hp_ext("explain", "job.elastic.min_node")
    assert done.code == 6
    assert "did you mean `min_nodes`?" in done.stderr


def test_instances_are_found_by_name_and_by_accelerator() -> None:
    assert [one["name"] for one in hp_ext("instances", "h100", "-o", "json").json] == [
        "ml.p5.48xlarge",
        "ml.p5.4xlarge",
    ]
    (one,) = hp_ext("instances", "ml.p5.48xlarge", "-o", "json").json
    assert (one["accelerators"], one["efa"], one["vcpus"], one["memory_gib"]) == (8, 32, 192, 2048)
    assert one["usable_cpus"] < 192
    assert one["usable_memory_mib"] < 2048 * 1024
    everything = hp_ext("instances", "--all", "-o", "json").json
    assert len(everything) == 209
    assert all(0 < one["usable_cpus"] < one["vcpus"] for one in everything)
    assert hp_ext("instances", "ml.p5.49xlarge").code == 6


def test_ejected_templates_render_the_same_until_they_are_changed(tmp_path: Path, root: Path) -> None:
    spec = root / "examples" / "04-hyperpod-eks" / "elastic.yaml"
    done = hp_ext("templates", "eject", tmp_path / "mine")
    assert "--templates" in done.stderr
    assert hp_ext("templates", "list").stdout.split() == sorted(
        str(file.relative_to(tmp_path / "mine")) for file in (tmp_path / "mine").rglob("*.j2")
    )
    arguments = ("render", spec, "--target", "hyperpod-eks")
    shipped = hp_ext(*arguments).stdout
    assert hp_ext(*arguments, "--templates", tmp_path / "mine").stdout == shipped
    own = tmp_path / "mine" / "hyperpod_eks" / "job.yaml.j2"
    own.write_text(own.read_text().replace("kind: HyperPodPyTorchJob", "kind: HyperPodPyTorchJob # mine"))
    assert "# mine" in hp_ext(*arguments, "--templates", tmp_path / "mine").stdout
    own.write_text("{% if %}")
    broken = hp_ext(*arguments, "--templates", tmp_path / "mine")
    assert (broken.code, broken.stdout) == (3, "")
    assert f"{own}:1: cannot be read" in broken.stderr
    assert hp_ext(*arguments, "--templates", tmp_path / "none").code == 6


def test_eject_overwrites_nothing(tmp_path: Path) -> None:
    name = "hyperpod_eks/start.sh.j2"
    assert hp_ext("templates", "eject", tmp_path, name).code == 0
    (tmp_path / name).write_text("mine")
    assert hp_ext("templates", "eject", tmp_path).code == 5
    assert [file.name for file in tmp_path.rglob("*.j2")] == ["start.sh.j2"]
    assert hp_ext("templates", "show", "hyperpod_eks/strat.sh.j2").code == 6


def test_list_without_jobs(place: LocalPlace) -> None:
    done = hp_ext("list")
    assert (done.code, done.stdout) == (0, "")
    assert hp_ext("list", "-o", "json").json == []


def test_strict_and_ignore(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nscript: train.py\nimage: repo/train\n")
    arguments = ("validate", spec, "--target", "hyperpod-eks")
    done = hp_ext(*arguments)
    assert done.code == 0
    assert f"warning: {spec}:3: image: without a tag" in done.stderr
    assert "[HPX134]" in done.stderr
    strict = hp_ext(*arguments, "--strict", "-o", "json")
    assert strict.code == 3
    assert [one["rule"] for one in strict.json["error"]["problems"]] == ["HPX134"]
    ignored = hp_ext(*arguments, "--strict", "--ignore", "HPX134")
    assert (ignored.code, ignored.stderr) == (0, "")
    assert hp_ext(*arguments, "--ignore", "HPX13").code == 2


def test_the_shell_scripts_complete_commands() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_HP_EXT_COMPLETE" in run_hp_ext("completion", shell).stdout


def test_a_field_of_entries_of_several_kinds_is_explained_for_all_of_them() -> None:
    kinds = hp_ext("explain", "volumes.kind", "-o", "json").json
    assert kinds["type"] == "claim | host | scratch | config | secret"
    assert "claim: A volume from a Kubernetes PersistentVolumeClaim" in kinds["description"]
    assert kinds["default"] is None
    tiers = hp_ext("explain", "checkpoint.tiers.kind").stdout
    assert "memory | peer | s3 | file" in tiers
    assert "s3: A prefix in an S3 bucket" in tiers


def test_a_number_that_may_be_left_to_the_planner_is_explained_so() -> None:
    explained = hp_ext("explain", "checkpoint.tiers.every_steps", "-o", "json").json
    assert explained["type"] == "whole number > 0 | auto"
