"""Specs of training jobs that between them use everything that SageMaker has."""

from __future__ import annotations

import json
from typing import Any

from hyperpod_ext.config.job.job import JobConfig

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.6.0-gpu-py312"
LEAST: dict[str, Any] = {
    "name": "tiny-gpt",
    "script": "train.py",
    "image": IMAGE,
    "resources": {"instance_type": "ml.p5.48xlarge"},
    "sagemaker": {
        "region": "us-west-2",
        "role": "arn:aws:iam::123456789012:role/training",
        "output": "s3://bucket/out",
    },
}


def spec(sagemaker: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """LEAST, with these fields besides."""
    return LEAST | fields | {"sagemaker": LEAST["sagemaker"] | (sagemaker or {})}


def job(sagemaker: dict[str, Any] | None = None, **fields: Any) -> JobConfig:
    """The same, validated."""
    return JobConfig.model_validate_json(json.dumps(spec(sagemaker, **fields)))


S3_TIER = {"tiers": [{"kind": "memory"}, {"kind": "s3", "uri": "s3://bucket/ck"}]}

CASES: dict[str, dict[str, Any]] = {
    "least": spec(),
    "everything at once": spec(
        args=["--steps", "40", "--text", 'it\'s "x" {y}'],
        nodes=2,
        workers_per_node=8,
        env={"NCCL_DEBUG": "WARN", "QUOTED": "say \"hi\"\nand 'bye'"},
        labels={"team": "a"},
        timeouts={"run_s": 7200},
        relaunch={"max_times": 2},
        checkpoint=S3_TIER,
        sagemaker={
            "keep_alive_s": 600,
            "checkpoint_uri": "s3://bucket/sync",
            "checkpoint_path": "/opt/ml/kept",
            "volume_gib": 100,
            "volume_kms_key": "alias/disk",
            "output_kms_key": "alias/out",
            "compress_output": False,
            "channels": {
                "train": {"kind": "s3", "uri": "s3://bucket/data"},
                "lists": {
                    "kind": "s3",
                    "uri": "s3://bucket/list.json",
                    "data": "ManifestFile",
                    "distribution": "ShardedByS3Key",
                    "mode": "File",
                    "content_type": "text/csv",
                    "compression": "Gzip",
                },
                "fsx": {"kind": "file-system", "id": "fs-0123456789abcdef0", "directory": "/fsx/data", "access": "rw"},
                "efs": {"kind": "file-system", "id": "fs-0123456789abcdef1", "directory": "/", "type": "EFS"},
            },
            "vpc": {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]},
            "metrics": [{"name": "loss", "regex": "loss ([0-9.]+)"}],
            "tags": {"owner": "me and you"},
            "remote_debug": True,
            "infra_check": True,
            "encrypt_traffic": True,
            "install": ["hyperpod-ext[runtime,s3]"],
        },
    ),
    "spot, from a plan of retries": spec(
        relaunch={"max_times": 30},
        checkpoint=S3_TIER,
        sagemaker={"spot": True, "max_wait_s": 100_000, "secret": "team/secret"},
    ),
    "a training plan": spec(
        sagemaker={"training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan-1"}
    ),
    "torchrun alone": spec(mode="plain", nodes=2, workers_per_node=8, args=["--steps", "40", "--lr=0.1"]),
    "two kinds of nodes": spec(
        nodes=3,
        node_groups=[
            {"name": "large", "nodes": 1, "instance_type": "ml.p5.48xlarge"},
            {"name": "small", "nodes": 2, "instance_type": "ml.p4d.24xlarge"},
        ],
    ),
    "torchrun on one of two kinds of nodes": spec(
        mode="plain",
        nodes=3,
        node_groups=[
            {"name": "large", "nodes": 1, "instance_type": "ml.p5.48xlarge"},
            {"name": "small", "nodes": 2, "instance_type": "ml.p4d.24xlarge"},
        ],
    ),
    "isolated": spec(sagemaker={"network_isolation": True}),
}
V2_ALONE: dict[str, dict[str, Any]] = {
    "filed and profiled": spec(
        sagemaker={"experiment": {"name": "e", "trial": "t", "run": "r"}, "profiler": True},
    ),
}
"""What ModelTrainer has no argument for."""
V3_ALONE: dict[str, dict[str, Any]] = {
    "waits no longer than an hour": spec(sagemaker={"max_pending_s": 3600}),
}
"""What sagemaker 2.x has no argument for."""
