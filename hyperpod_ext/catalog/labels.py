"""Labels, annotations, names and ports of HyperPod, Kueue, Kubernetes and this project."""

from __future__ import annotations

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Label of a node with its instance type, on HyperPod `ml.p5.48xlarge`."""
NODE_HEALTH = "sagemaker.amazonaws.com/node-health-status"
"""Label of a node with its health: Schedulable, Unschedulable, UnschedulablePendingReplacement or
UnschedulablePendingReboot."""
DEEP_HEALTH = "sagemaker.amazonaws.com/deep-health-check-status"
"""Label of a node with the result of its deep health check: InProgress, Passed or Failed. Missing without a check."""
COMPUTE_TYPE = "sagemaker.amazonaws.com/compute-type"
"""Label of a node, `hyperpod`."""

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
TOPOLOGY_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
TOPOLOGY_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
TOPOLOGY_LEVELS = (
    "topology.k8s.aws/ultraserver-id",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
)
"""Labels of AWS on nodes. Layer 3 is the closest of the three layers."""

AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
MAX_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"

HPJOB = "HPJob"
"""Label of a HyperPodPyTorchJob's pods, with the job's name."""
OPERATOR_NAMESPACE = "aws-hyperpod"
OPERATOR_POD = "hp-training-control-plane"
KUBEFLOW_JOB = "training.kubeflow.org/job-name"
KUBEFLOW_RANK = "training.kubeflow.org/replica-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB = "hyperpod-ext/job"
"""This project's label on all objects of a job, with the job's name."""
DISK_VOLUME = "hyperpod-ext-disk"
"""Prefix of volume names for disk tiers, before a number."""
SECRET_VOLUME = "hyperpod-ext-secret"
"""Volume of a pod with the job's secret."""
SECRET_DIR = "/var/run/hyperpod-ext"
"""Mount path of SECRET_VOLUME."""
ADDRESSES_VOLUME = "hyperpod-ext-addresses"
"""Volume of a pod in which hyperpodrun stores addresses from the operator."""
ADDRESSES_DIR = "/opt/ml/input/config"
"""Mount path of ADDRESSES_VOLUME. In most images, only root could create this folder."""
AGENT_PORT = 8080
"""Port of hyperpodrun for its operator, without authentication."""

EFA = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"
