"""hp-ext cluster create and cluster update, over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import AwsStandIn, Failure, aws_here
from clusters import EKS, GROUP, LEAST, SLURM, VPC
from command import Done, call_hp_ext

FILE = ("-f", "cluster.yaml")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsStandIn]:
    with aws_here(monkeypatch) as state:
        yield state


def write(folder: Path, spec: dict[str, Any], **fields: Any) -> None:
    (folder / "cluster.yaml").write_text(json.dumps(spec | fields, indent=1))


def hp_ext(folder: Path, *arguments: str) -> Done:
    return call_hp_ext(*arguments, cwd=folder)


def test_a_dry_run_shows_the_request_and_asks_nobody(tmp_path: Path, aws: AwsStandIn) -> None:
    write(tmp_path, EKS)
    shown = hp_ext(tmp_path, "cluster", "create", *FILE, "--dry-run", "-o", "json")
    assert (shown.code, shown.json["request"]["ClusterName"], aws.calls) == (0, "research", [])


@pytest.mark.parametrize("spec", [LEAST, EKS, SLURM], ids=["least", "eks", "slurm"])
def test_a_cluster_is_created_and_then_is_as_its_spec_says(
    tmp_path: Path, aws: AwsStandIn, spec: dict[str, Any]
) -> None:
    write(tmp_path, spec)
    created = hp_ext(tmp_path, "cluster", "create", *FILE, "--wait", "-o", "json")
    assert (created.code, created.json["status"]) == (0, "InService")
    same = hp_ext(tmp_path, "cluster", "update", *FILE, "--yes")
    assert (same.code, same.stdout, aws.count("UpdateCluster")) == (0, "research already matches its spec\n", 0)
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 5


def test_an_update_shows_its_changes_asks_and_sends_them(
    tmp_path: Path, aws: AwsStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LEAST)
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 0
    write(tmp_path, LEAST, instance_groups=[GROUP | {"count": 6}], tags={"team": "a"})
    shown = hp_ext(tmp_path, "cluster", "update", *FILE, "--dry-run")
    assert shown.stdout == "~ InstanceGroups.workers.InstanceCount: 4 -> 6\n~ Tags.team: nothing -> a\n"
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert (hp_ext(tmp_path, "cluster", "update", *FILE).code, aws.count("UpdateCluster")) == (130, 0)
    aws.on_AddTags = lambda request: aws.clusters["research"].update(Tags=request["Tags"]) or {}  # type: ignore[attr-defined]
    assert hp_ext(tmp_path, "cluster", "update", *FILE, "--yes", "--wait").code == 0
    assert hp_ext(tmp_path, "cluster", "update", *FILE, "--yes").stdout == "research already matches its spec\n"


def test_a_change_that_needs_a_new_cluster_is_refused_with_the_reason(tmp_path: Path, aws: AwsStandIn) -> None:
    write(tmp_path, LEAST)
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 0
    group = GROUP | {"instance_type": "ml.p5e.48xlarge"}
    write(tmp_path, LEAST, vpc=VPC | {"subnets": ["subnet-9"]}, instance_groups=[group])
    refused = hp_ext(tmp_path, "cluster", "update", *FILE, "--yes", "-o", "json")
    assert (refused.code, aws.count("UpdateCluster")) == (3, 0)
    assert "! VpcConfig" in refused.stderr
    hints = {one["path"]: one["hint"] for one in refused.json["error"]["problems"]}
    assert "this needs a new cluster" in hints["VpcConfig"]
    assert "this needs a new group" in hints["InstanceGroups.workers.InstanceType"]


def test_a_group_that_the_spec_does_not_name_is_kept_unless_asked(tmp_path: Path, aws: AwsStandIn) -> None:
    write(tmp_path, LEAST, instance_groups=[GROUP, GROUP | {"name": "old"}])
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 0
    write(tmp_path, LEAST)
    kept = hp_ext(tmp_path, "cluster", "update", *FILE, "--yes")
    assert (kept.code, aws.count("UpdateCluster")) == (0, 0)
    assert "group old is not in the spec, and is kept" in kept.stderr
    gone = hp_ext(tmp_path, "cluster", "update", *FILE, "--yes", "--delete-groups", "-o", "json")
    assert gone.json["request"] == {"ClusterName": "research", "InstanceGroupsToDelete": ["old"]}
    assert [group["InstanceGroupName"] for group in aws.clusters["research"]["InstanceGroups"]] == ["workers"]


def test_mistakes_are_told_with_their_lines_before_aws_is_asked(tmp_path: Path, aws: AwsStandIn) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: research\nregion: us-west-2\norchestrator: slurm\nexecution_role: arn:aws:iam::123456789012:role/a\n"
        "tiered_storage: {}\ninstance_groups:\n  - name: a\n    instance_type: ml.p5.48xlarge\n    count: 1\n"
        "    labels: {a: b}\n"
    )
    told = hp_ext(tmp_path, "cluster", "create", *FILE)
    assert (told.code, aws.calls) == (3, [])
    assert "cluster.yaml:5: tiered_storage: is only valid for orchestrator eks" in told.stderr
    assert "cluster.yaml:10: instance_groups.0.labels" in told.stderr


def test_a_type_that_no_cluster_has_is_told_by_the_services_model(tmp_path: Path, aws: AwsStandIn) -> None:
    write(tmp_path, LEAST, instance_groups=[GROUP | {"instance_type": "ml.p5.48xlarg"}])
    told = hp_ext(tmp_path, "cluster", "create", *FILE)
    assert (told.code, aws.calls) == (3, [])
    assert "InstanceGroups.0.InstanceType" in told.stderr
    assert "ml.p5.48xlarge" in told.stderr


def test_a_cluster_that_fails_or_is_not_there_is_said(tmp_path: Path, aws: AwsStandIn) -> None:
    write(tmp_path, LEAST)
    assert hp_ext(tmp_path, "cluster", "update", *FILE).code == 6
    aws.failures["CreateCluster"] = Failure(400, "AccessDeniedException")
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 4
    aws.failures.clear()
    assert hp_ext(tmp_path, "cluster", "create", *FILE).code == 0
    aws.clusters["research"] |= {"ClusterStatus": "Failed", "FailureMessage": "no capacity"}
    write(tmp_path, LEAST, instance_groups=[GROUP | {"count": 6}])
    aws.on_UpdateCluster = lambda request: {"ClusterArn": "x"}  # type: ignore[method-assign]
    failed = hp_ext(tmp_path, "cluster", "update", *FILE, "--yes", "--wait")
    assert (failed.code, "no capacity" in failed.stderr) == (1, True)
