"""Specs of clusters that between them use every member of CreateCluster."""

from __future__ import annotations

import json
from typing import Any

from hyperpod_ext.config.clusters.cluster import ClusterConfig

ROLE = "arn:aws:iam::123456789012:role/hyperpod"
FSX = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan-1"
VPC = {"subnets": ["subnet-0", "subnet-1"], "security_groups": ["sg-0"]}
ROLLOUT = {"batch": {"nodes": 2}, "rollback_batch": {"percent": 50}, "wait_s": 60, "alarms": ["too-hot"]}
STORAGE = [
    {"kind": "ebs", "size_gib": 500, "kms_key": "alias/disk"},
    {"kind": "ebs", "kms_key": "alias/disk", "root": True},
    {"kind": "fsx-lustre", "dns_name": FSX, "mount_name": "fsx", "path": "/fsx"},
    {"kind": "fsx-openzfs", "dns_name": FSX, "path": "/home"},
]
GROUP = {"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 4}

LEAST: dict[str, Any] = {
    "name": "research",
    "region": "us-west-2",
    "eks_cluster_arn": "arn:aws:eks:us-west-2:123456789012:cluster/research",
    "vpc": VPC,
    "execution_role": ROLE,
    "instance_groups": [GROUP],
}

EKS: dict[str, Any] = LEAST | {
    "instance_groups": [
        GROUP
        | {
            "spares": 1,
            "min_count": 2,
            "execution_role": "arn:aws:iam::123456789012:role/other",
            "lifecycle": {"source": "s3://sagemaker-a/b", "on_create": "on_create.sh", "on_init_complete": "done.sh"},
            "threads_per_core": 2,
            "storage": STORAGE,
            "deep_health_checks": ["InstanceStress", "InstanceConnectivity"],
            "training_plan": PLAN,
            "vpc": {"subnets": ["subnet-2"], "security_groups": ["sg-1", "sg-2"]},
            "network_interface": "efa-only",
            "image": "ami-0123456789abcdef0",
            "image_release": "1.2.3",
            "scheduled_update": {"schedule": "cron(0 3 ? * SUN *)", "rollout": ROLLOUT},
            "auto_patch": {
                "strategy": "DrainFirst",
                "next_date": "2027-01-31",
                "rollout": ROLLOUT,
                "drain_timeout_s": 600,
                "on_drain_timeout": "Force",
            },
            "labels": {"team": "a", "example.com/kind": "training"},
            "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
        },
        {
            "name": "any-of-two",
            "instance_type": "ml.p5.48xlarge",
            "other_types": ["ml.p5e.48xlarge"],
            "count": 0,
            "capacity": "spot",
        },
        {
            "name": "on-demand",
            "instance_type": "ml.p5en.48xlarge",
            "count": 1,
            "capacity": "on-demand",
            "auto_patch": {"strategy": "WhenIdle", "idle_s": 3600},
        },
    ],
    "restricted_groups": [
        {
            "name": "closed",
            "instance_type": "ml.p5.48xlarge",
            "count": 2,
            "threads_per_core": 1,
            "storage": STORAGE,
            "deep_health_checks": ["MultiNodeTrainingValidation"],
            "training_plan": PLAN,
            "vpc": VPC,
            "scheduled_update": {"schedule": "cron(0 3 ? * SUN *)", "rollout": ROLLOUT},
            "lustre": {"size_gib": 2400, "throughput": 250},
        }
    ],
    "restricted_environment": {"lustre": {"size_gib": 1200, "throughput": 125}, "deletion": "DeleteIfNotUsed"},
    "cluster_role": ROLE,
    "node_recovery": "None",
    "continuous_provisioning": True,
    "tiered_storage": {"memory_percent": 20},
    "auto_scaling": {},
    "tags": {"project": "research", "owner": "me and you"},
}

SLURM: dict[str, Any] = {
    "name": "research",
    "region": "us-west-2",
    "orchestrator": "slurm",
    "continuous_provisioning": True,
    "execution_role": ROLE,
    "slurm": {
        "strategy": "Merge",
        "accounting": {
            "endpoint": "db.example.com",
            "port": 3306,
            "name": "slurm",
            "secret_arn": "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm",
        },
    },
    "instance_groups": [
        {"name": "head", "instance_type": "ml.m5.xlarge", "count": 1, "slurm": {"node_type": "Controller"}},
        GROUP | {"slurm": {"node_type": "Compute", "partition": "dev"}},
    ],
}

CASES = {"least": LEAST, "eks": EKS, "slurm": SLURM}


def cluster(base: dict[str, Any] | None = None, **fields: Any) -> ClusterConfig:
    """LEAST, or another, with these fields."""
    return ClusterConfig.model_validate_json(json.dumps((base or LEAST) | fields))


def with_group(**fields: Any) -> ClusterConfig:
    """LEAST, whose only group has these fields too."""
    return cluster(instance_groups=[GROUP | fields])
