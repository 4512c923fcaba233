"""Example values of fields whose model has no example, and whose type does not determine one."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {
    "annotations": {"example.com/owner": "research"},
    "chaos.faults": [{"kind": "kill", "rank": 2, "step": 13}],
    "chaos.faults.kind": "kill",
    "chaos.inject.phase": "backward",
    "chaos.inject.step": 20,
    "checkpoint.tiers.budget_mib": 4096,
    "checkpoint.tiers.every_seconds": 600.0,
    "checkpoint.tiers.keep_every_steps": 1000,
    "checkpoint.tiers.keep_steps": [1000, 5000],
    "checkpoint.tiers.parity": 4,
    "cluster": "research",
    "command": ["./train.sh"],
    "elastic.batch": {"micro_batch_size": 4},
    "elastic.batch.micro_batch_size": 4,
    "elastic.batch.scale_config.global_batch_size": 256,
    "elastic.batch.scale_config.learning_rate_factor": 0.5,
    "elastic.batch.scale_config.micro_batch_size": 4,
    "elastic.faulty_scale_down_s": 300,
    "elastic.notices": {"ec2": True},
    "elastic.notices.file": "/var/run/leave",
    "elastic.step": 2,
    "env": {"NCCL_DEBUG": "WARN"},
    "kubernetes.context": "research",
    "kubernetes.job_secret": "tiny-gpt-secret",
    "kubernetes.operator_addresses": ["10.1.0.0/16"],
    "kubernetes.pull_secrets": ["registry"],
    "kubernetes.termination_grace_s": 600,
    "kubernetes.workload_mode": "ours",
    "labels": {"team": "research"},
    "libraries": {"ofi_nccl": "1.16.3"},
    "libraries.libfabric": "2.1.0",
    "libraries.ofi_nccl": "1.16.3",
    "log_rules.operator": "lt",
    "log_rules.stop_pattern": "validation begins",
    "log_rules.threshold": 100.0,
    "network": {"interface": "ens5"},
    "network.interface": "ens5",
    "node_groups.instance_type": "ml.p5.48xlarge",
    "node_groups.max_nodes": 4,
    "node_groups.node_selector": {"zone": "usw2-az1"},
    "overlay.slurm": {"sbatch": ["mail-type=END"]},
    "overlay.slurm.before": ["module load cuda"],
    "overlay.slurm.sbatch": ["mail-type=END"],
    "overlay.slurm.srun": {"mpi": "none"},
    "relaunch.max_process_restarts": 10,
    "relaunch.scale_up_pause_s": 600,
    "resources.accelerator_resource": "nvidia.com/gpu",
    "resources.accelerators": 8,
    "resources.cpus": 90.0,
    "resources.efa": 32,
    "resources.ephemeral_storage_mib": 102400,
    "resources.hugepages_mib": 5120,
    "resources.memory_mib": 1048576,
    "restart.max_restarts_in_window": 10,
    "sagemaker.channels.content_type": "application/x-parquet",
    "sagemaker.checkpoint_uri": "s3://my-bucket/checkpoints",
    "sagemaker.code": "s3://my-bucket/code",
    "sagemaker.experiment.run": "first",
    "sagemaker.experiment.trial": "baseline",
    "sagemaker.max_pending_s": 7200,
    "sagemaker.max_wait_s": 172800,
    "sagemaker.output_kms_key": "alias/training",
    "sagemaker.secret": "hyperpod-ext/tiny-gpt",
    "sagemaker.training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/research",
    "sagemaker.volume_gib": 500,
    "sagemaker.volume_kms_key": "alias/training",
    "scheduling.node_selector": {"zone": "usw2-az1"},
    "scheduling.pod_priority_class": "research",
    "scheduling.tolerations": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
    "scheduling.tolerations.key": "dedicated",
    "scheduling.tolerations.seconds": 300,
    "scheduling.tolerations.value": "training",
    "slurm.account": "research",
    "slurm.constraint": "p5",
    "slurm.exclude": "node-7",
    "slurm.gres": "gpu:8",
    "slurm.reservation": "research",
    "slurm.sbatch": {"mail-type": "END"},
    "slurm.setup": ["source /fsx/venv/bin/activate"],
    "timeouts.fault_s": 600,
    "timeouts.keep_s": 86400,
    "timeouts.start_s": 1800,
    "volumes.size_mib": 10240,
    "volumes.sub_path": "tokens",
}
ROLE = "arn:aws:iam::123456789012:role/training"
KEY = "arn:aws:kms:us-west-2:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/research"
CLUSTER: dict[str, Any] = {
    "account.eks_version": "1.33",
    "account.file_systems": {"fs-0123456789abcdef0": "usw2-az1"},
    "account.lifecycle_files": ["s3://my-bucket/lifecycle/on_create.sh"],
    "account.quotas": {"ml.p5.48xlarge": {"machines": 16}},
    "account.subnets.free_addresses": 4091,
    "account.training_plans": {PLAN: {"instance_type": "ml.p5.48xlarge"}},
    "account.training_plans.count": 16,
    "account.training_plans.zone": "usw2-az1",
    "checkpoint_bucket": "my-checkpoints",
    "infrastructure.account": "123456789012",
    "infrastructure.add_ons.observability.workspace_arn": "arn:aws:aps:us-west-2:123456789012:workspace/ws-1",
    "infrastructure.network.connected_cidrs": ["10.2.0.0/16"],
    "infrastructure.network.control_plane_subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
    "infrastructure.network.group_zones": {"workers": "usw2-az1"},
    "infrastructure.network.vpc_id": "vpc-0123456789abcdef0",
    "instance_groups.taints.value": "training",
    "instance_groups.threads_per_core": 2,
    "restricted_groups.threads_per_core": 2,
    "slurm.accounting.name": "slurm",
    "slurm.accounting.port": 3306,
    "tiered_storage.memory_percent": 40,
}
CLUSTER_BY_NAME: dict[str, Any] = {
    "alarms": ["gpu-errors"],
    "cluster_role": ROLE,
    "code": "L-0123ABCD",
    "drain_timeout_s": 3600,
    "execution_role": ROLE,
    "existing": "my-bucket",
    "idle_s": 7200,
    "image": "ami-0123456789abcdef0",
    "image_release": "1.2.3",
    "kms_key": KEY,
    "next_date": "2027-01-15",
    "on_init_complete": "on_init.sh",
    "other_types": ["ml.p5e.48xlarge"],
    "path": "/fsx",
    "percent": 10,
    "size_gib": 1200,
    "training_plan": PLAN,
    "wait_s": 600,
}
"""Values of fields that several sections of a cluster spec have, by the last name of their paths."""
BUCKETS = ("checkpoints", "data", "lifecycle", "logs")
for bucket in BUCKETS:
    CLUSTER[f"infrastructure.buckets.{bucket}"] = {"name": f"my-{bucket}"}
    CLUSTER[f"infrastructure.buckets.{bucket}.name"] = f"my-{bucket}"
CLUSTER["infrastructure.buckets"] = {"checkpoints": {"name": "my-checkpoints"}}
KEYS = {"account.training_plans": PLAN, "account.quotas": "ml.p5.48xlarge"}
"""Keys in examples of mappings; other mappings get the key `data`."""
ONE_OF = {"chaos.faults": {"rank": 2, "node": 1}}
"""Fields of a section of which exactly one is needed."""


def known(spec: str, dotted: str) -> Any:
    """Return the value of a field in these tables, or None."""
    if spec == "job":
        return JOB.get(dotted)
    return CLUSTER.get(dotted, CLUSTER_BY_NAME.get(dotted.rpartition(".")[2]))
