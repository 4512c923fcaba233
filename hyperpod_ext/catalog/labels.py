"""Labels, annotations, names and ports that HyperPod, Kueue, Kubernetes and our own objects give a meaning to."""

from __future__ import annotations

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Of a node; on HyperPod its value is `ml.p5.48xlarge`."""
NODE_HEALTH = "sagemaker.amazonaws.com/node-health-status"
"""Schedulable, Unschedulable, UnschedulablePendingReplacement or UnschedulablePendingReboot."""
DEEP_HEALTH = "sagemaker.amazonaws.com/deep-health-check-status"
"""InProgress, Passed or Failed; nodes that were not checked have none."""
COMPUTE_TYPE = "sagemaker.amazonaws.com/compute-type"
"""Of a node: `hyperpod`."""

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
"""Labels that AWS puts on nodes, loosest last but for the ultraserver; layer 3 is the closest."""

AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
MAX_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"

HPJOB = "HPJob"
"""Of the pods of a HyperPodPyTorchJob: its name."""
OPERATOR_NAMESPACE = "aws-hyperpod"
OPERATOR_POD = "hp-training-control-plane"
KUBEFLOW_JOB = "training.kubeflow.org/job-name"
KUBEFLOW_RANK = "training.kubeflow.org/replica-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB = "hyperpod-ext/job"
"""Ours, on everything that belongs to a job: its name."""
DISK_VOLUME = "hyperpod-ext-disk"
"""Name of a pod's volume with a folder of the node, for a tier on its disk; a number follows."""
SECRET_VOLUME = "hyperpod-ext-secret"
"""Of a pod: it has the job's secret."""
SECRET_DIR = "/var/run/hyperpod-ext"
"""Where that is mounted."""
ADDRESSES_VOLUME = "hyperpod-ext-addresses"
"""Of a pod: hyperpodrun keeps there what addresses the operator has told."""
ADDRESSES_DIR = "/opt/ml/input/config"
"""Where hyperpodrun wants that; only root could make it in most images."""
AGENT_PORT = 8080
"""Where hyperpodrun listens to its operator; it asks nobody who they are."""

EFA = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"
