"""What a cluster's outputs settle in a job that names it, and what the job itself says."""

from __future__ import annotations

from typing import Any

import pytest

from hyperpod_ext.clusters.cdk.jobs import checkpoint_uri, on_cluster
from hyperpod_ext.clusters.cdk.outputs import ClusterOutputs
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError

EKS = {"Namespace": "team", "ServiceAccount": "trainer", "QueueName": "queue", "CheckpointBucket": "b"}


def outputs(**values: str) -> ClusterOutputs:
    return ClusterOutputs("c", "us-west-2", 0.0, EKS | values)


def job(**fields: Any) -> JobConfig:
    return JobConfig.model_validate({"name": "j", "script": "train.py", **fields})


def test_what_a_job_leaves_open_comes_from_its_cluster() -> None:
    found = on_cluster(job(), outputs(), "kubeflow")
    assert (found.kubernetes.namespace, found.kubernetes.service_account) == ("team", "trainer")
    assert found.scheduling.queue == "queue"


def test_what_a_job_says_itself_wins() -> None:
    found = on_cluster(job(kubernetes={"service_account": "mine"}, scheduling={"queue": "other"}), outputs(), None)
    assert (found.kubernetes.namespace, found.kubernetes.service_account) == ("team", "mine")
    assert found.scheduling.queue == "other"


def test_in_another_namespace_the_clusters_service_account_is_none() -> None:
    found = on_cluster(job(kubernetes={"namespace": "elsewhere"}), outputs(), "kubeflow")
    assert (found.kubernetes.namespace, found.kubernetes.service_account) == ("elsewhere", None)


def test_an_output_that_does_not_fit_its_field_is_told() -> None:
    with pytest.raises(ConfigError, match="of cluster c is not valid"):
        on_cluster(job(), outputs(Namespace="Not A Name"), "kubeflow")


@pytest.mark.parametrize(
    ("values", "uri"),
    [({}, "s3://b"), ({"CheckpointPrefix": "/some/prefix/"}, "s3://b/some/prefix"), ({"CheckpointBucket": ""}, None)],
)
def test_where_checkpoints_go(values: dict[str, str], uri: str | None) -> None:
    assert (checkpoint_uri(outputs(**values)) or None) == uri
