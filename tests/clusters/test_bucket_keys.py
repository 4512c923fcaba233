"""Existing buckets with keys that the cluster's file does not name, as moto's S3 has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deployments import IMPORTED, deployment

from hyperpod_ext.clusters.bucket_keys import problems
from hyperpod_ext.jobs.sagemaker import client as client_module

KEY = "arn:aws:kms:us-west-2:123456789012:key/11111111-2222-3333-4444-555555555555"


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    mock_aws = pytest.importorskip("moto").mock_aws
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    client_module.client.cache_clear()
    with mock_aws():
        import boto3

        yield boto3
    client_module.client.cache_clear()


def test_an_existing_bucket_with_a_key_of_its_own_is_named_with_the_key(moto: Any) -> None:
    s3 = moto.client("s3", region_name="us-west-2")
    s3.create_bucket(Bucket="my-checkpoints", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}}
    s3.put_bucket_encryption(Bucket="my-checkpoints", ServerSideEncryptionConfiguration={"Rules": [rule]})
    unread: list[str] = []
    (found,) = problems(deployment(IMPORTED), unread)
    assert (found.path, found.hint) == ("infrastructure.buckets.checkpoints.kms_key", f"write {KEY}")
    assert [sentence.partition(" is not checked")[0] for sentence in unread] == ["infrastructure.buckets.data.kms_key"]
    named = {"checkpoints": {"existing": "my-checkpoints", "kms_key": KEY}}
    assert list(problems(deployment(IMPORTED, infrastructure__buckets=named), unread)) == []
