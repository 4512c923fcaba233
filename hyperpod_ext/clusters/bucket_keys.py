"""Asks S3 for the KMS keys of existing buckets, and checks the keys."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import HyperpodExtError, Problem
from hyperpod_ext.jobs.sagemaker.client import call, client


def problems(cluster: ClusterConfig, unread: list[str]) -> Iterator[Problem]:
    """Yield a problem for each existing bucket with a KMS key that the spec does not name. The roles of the cluster
    could not use such a key.

    Args:
        unread: list to which a sentence is appended for each bucket whose encryption could not be read.
    """
    made = cluster.infrastructure
    for field in ("checkpoints", "data", "lifecycle") if made is not None else ():
        bucket = getattr(made and made.buckets, field)
        if bucket.existing is None or bucket.kms_key is not None:
            continue
        path = f"infrastructure.buckets.{field}.kms_key"
        try:
            key = _key_of(bucket.existing, cluster.region)
        except HyperpodExtError as error:
            unread.append(f"{path} is not checked: {error.message}")
            continue
        if key is not None:
            yield Problem(f"is missing, but bucket {bucket.existing} has a KMS key", path=path, hint=f"write {key}")


def _key_of(bucket: str, region: str) -> str | None:
    s3 = client("s3", region)
    answer = call(f"GetBucketEncryption {bucket}", lambda: s3.get_bucket_encryption(Bucket=bucket))
    for rule in answer["ServerSideEncryptionConfiguration"]["Rules"]:
        default = rule.get("ApplyServerSideEncryptionByDefault", {})
        key = default.get("KMSMasterKeyID")
        if default.get("SSEAlgorithm", "").startswith("aws:kms") and key and "alias/aws/" not in key:
            return str(key)
    return None
