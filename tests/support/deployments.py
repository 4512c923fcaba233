"""Specs of clusters with what is made around them."""

from __future__ import annotations

import copy
import json
from typing import Any

from clusters import GROUP, LEAST

from hyperpod_ext.config.clusters.cluster import ClusterConfig

EKS: dict[str, Any] = {
    "name": "research",
    "region": "us-west-2",
    "instance_groups": [GROUP, {"name": "others", "instance_type": "ml.g5.12xlarge", "count": 2}],
    "tiered_storage": {"memory_percent": 20},
    "continuous_provisioning": True,
    "auto_scaling": {},
    "tags": {"project": "research"},
    "infrastructure": {
        "network": {"zones": ["usw2-az1", "usw2-az2"], "group_zones": {"others": "usw2-az2"}},
        "eks": {"admins": ["arn:aws:iam::123456789012:role/admin"], "public_access": ["203.0.113.0/24"]},
        "file_system": {"link_data": True},
        "add_ons": {
            "cert_manager": True,
            "training_operator": True,
            "task_governance": {"teams": [{"name": "a", "instance_type": "ml.p5.48xlarge", "count": 2, "weight": 10}]},
            "observability": {},
        },
        "job_roles": [
            {"namespace": "hyperpod-ns-a", "service_account": "training", "jobs": "tiny-gpt"},
            {"namespace": "hyperpod-ns-a", "service_account": "sweeps", "jobs": "sweep-*"},
        ],
    },
}
"""Everything at once."""

SLURM: dict[str, Any] = {
    "name": "research",
    "region": "us-west-2",
    "orchestrator": "slurm",
    "slurm": {"strategy": "Managed"},
    "instance_groups": [
        {"name": "head", "instance_type": "ml.m5.xlarge", "count": 1, "slurm": {"node_type": "Controller"}},
        {
            "name": "workers",
            "instance_type": "ml.p5.48xlarge",
            "count": 4,
            "slurm": {"node_type": "Compute", "partition": "dev"},
        },
    ],
    "infrastructure": {"network": {"zones": ["us-west-2a"]}, "file_system": {"size_gib": 2400}},
}

LEAST_EKS: dict[str, Any] = {
    "name": "small",
    "region": "us-west-2",
    "instance_groups": [GROUP],
    "infrastructure": {"network": {"zones": ["usw2-az1", "usw2-az2"]}},
}

IMPORTED: dict[str, Any] = LEAST | {
    "vpc": {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]},
    "checkpoint_bucket": "my-checkpoints",
    "infrastructure": {
        "network": {"vpc_id": "vpc-0123456789abcdef0"},
        "buckets": {"checkpoints": {"existing": "my-checkpoints"}, "data": {"existing": "my-data"}},
        "job_roles": [{"namespace": "default", "service_account": "training", "jobs": "a-*"}],
    },
}
"""Network, EKS cluster and buckets are there already."""

OWN_NETWORKS: dict[str, Any] = {
    **{name: value for name, value in IMPORTED.items() if name not in ("execution_role", "infrastructure")},
    "instance_groups": [
        GROUP,
        {
            "name": "elsewhere",
            "instance_type": "ml.g5.12xlarge",
            "count": 2,
            "vpc": {"subnets": ["subnet-0123456789abcdef1"], "security_groups": ["sg-0123456789abcdef1"]},
        },
    ],
    "infrastructure": IMPORTED["infrastructure"] | {"file_system": {"size_gib": 1200}},
}
"""In a network that is there already; the second group names a subnet and a security group of its own in it."""

CASES = {"eks": EKS, "slurm": SLURM, "least": LEAST_EKS, "imported": IMPORTED, "own networks": OWN_NETWORKS}


def deployment(base: dict[str, Any] | None = None, **changes: Any) -> ClusterConfig:
    """LEAST_EKS, or another, with these changes; `infrastructure__network__zones=[...]` goes inside."""
    data = copy.deepcopy(base or LEAST_EKS)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return ClusterConfig.model_validate_json(json.dumps(data))
