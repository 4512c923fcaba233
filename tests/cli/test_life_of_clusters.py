"""hp-ext cluster list, describe, nodes and delete, on moto."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from aws_stand_in import Failure, aws_stand_in
from command import call_hp_ext
from moto_server import endpoint

from hyperpod_ext.jobs.sagemaker import client

REGION = ("--region", "us-west-2")


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    client.client.cache_clear()
    yield
    client.client.cache_clear()


@pytest.fixture
def moto(identity: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty account."""
    urllib.request.urlopen(urllib.request.Request(f"{endpoint()}/moto-api/reset", method="POST")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint())


def create(name: str, **counts: int) -> None:
    def group(of: str, count: int) -> dict[str, Any]:
        return {
            "InstanceGroupName": of,
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": count,
            "ExecutionRole": "arn:aws:iam::123456789012:role/a",
            "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-a/b", "OnCreate": "on_create.sh"},
            "ThreadsPerCore": 1,
        }

    service = client.client("sagemaker", "us-west-2")
    service.create_cluster(ClusterName=name, InstanceGroups=[group(of, count) for of, count in counts.items()])


def test_a_region_without_clusters_says_so(moto: None) -> None:
    told = call_hp_ext("cluster", "list", *REGION)
    assert (told.code, told.stdout) == (0, "")
    assert "no clusters in this region" in told.stderr
    assert call_hp_ext("cluster", "list", *REGION, "-o", "json").json == []


def test_clusters_are_listed_by_name_beyond_the_first_page(moto: None) -> None:
    for number in range(102):  # moto has pages of a hundred
        create(f"research-{number:03}", workers=0)
    told = call_hp_ext("cluster", "list", *REGION, "-o", "json")
    assert [one["name"] for one in told.json] == [f"research-{number:03}" for number in range(102)]
    assert {one["status"] for one in told.json} == {"InService"}
    lines = call_hp_ext("cluster", "list", *REGION).stdout.splitlines()
    assert (len(lines), lines[0].split()) == (103, ["NAME", "STATUS", "CREATED"])


def test_a_cluster_and_its_nodes_are_shown(moto: None) -> None:
    create("research", workers=2, head=1)
    shown = call_hp_ext("cluster", "describe", "research", *REGION, "-o", "json").json
    assert [(group["name"], group["count"], group["target"]) for group in shown["groups"]] == [
        ("workers", 2, 2),
        ("head", 1, 1),
    ]
    assert (shown["status"], shown["orchestrator"]) == ("InService", "slurm")
    assert "workers  ml.p5.48xlarge  2/2" in call_hp_ext("cluster", "describe", "research", *REGION).stdout
    nodes = call_hp_ext("cluster", "nodes", "research", *REGION, "-o", "json").json
    assert [node["id"] for node in nodes] == ["head-0", "workers-0", "workers-1"]
    some = call_hp_ext("cluster", "nodes", "research", *REGION, "--group", "workers").stdout.splitlines()
    assert [line.split()[0] for line in some] == ["NODE", "workers-0", "workers-1"]
    unknown = call_hp_ext("cluster", "nodes", "research", *REGION, "--group", "worker")
    assert (unknown.code, "workers" in unknown.stderr) == (6, True)


@pytest.mark.parametrize("command", ["describe", "nodes", "delete"])
def test_a_cluster_that_does_not_exist_is_not_found(moto: None, command: str) -> None:
    more = ["--yes"] if command == "delete" else []
    told = call_hp_ext("cluster", command, "nobody", *REGION, *more, "-o", "json")
    assert (told.code, told.json["error"]["code"]) == (6, "NotFoundError")


def test_a_deletion_shows_what_would_end_asks_and_deletes(moto: None, monkeypatch: pytest.MonkeyPatch) -> None:
    create("research", workers=2)
    create("other", workers=1)
    dry = call_hp_ext("cluster", "delete", "research", *REGION, "--dry-run", "-o", "json")
    assert (dry.code, dry.json["request"]) == (0, {"ClusterName": "research"})
    assert [node["id"] for node in dry.json["nodes"]] == ["workers-0", "workers-1"]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = call_hp_ext("cluster", "delete", "research", *REGION)
    assert (asked.code, "Delete research with its 2 nodes?" in asked.stderr) == (130, True)
    assert len(call_hp_ext("cluster", "list", *REGION, "-o", "json").json) == 2
    done = call_hp_ext("cluster", "delete", "research", *REGION, "--yes", "--wait", "-o", "json")
    assert (done.code, done.json["status"]) == (0, "deleted")
    assert [one["name"] for one in call_hp_ext("cluster", "list", *REGION, "-o", "json").json] == ["other"]


def test_a_cluster_that_is_being_changed_is_not_deleted(identity: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with aws_stand_in() as aws:
        monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
        cluster = {"ClusterName": "research", "ClusterArn": "arn", "ClusterStatus": "Updating"}
        aws.clusters["research"] = cluster
        told = call_hp_ext("cluster", "delete", "research", *REGION, "--yes")
        assert (told.code, "has status Updating" in told.stderr, aws.count("DeleteCluster")) == (5, True, 0)
        aws.failures["DescribeCluster"] = Failure(400, "AccessDeniedException")
        assert call_hp_ext("cluster", "delete", "research", *REGION, "--yes").code == 4
