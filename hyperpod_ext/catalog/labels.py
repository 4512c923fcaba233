"""Kubernetes labels, annotations, object names and ports that HyperPod, Kueue, Kubernetes and this project use."""

from __future__ import annotations

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Node label with the instance type of the node; on HyperPod with the prefix `ml.`, such as `ml.p5.48xlarge`."""
NODE_HEALTH = "sagemaker.amazonaws.com/node-health-status"
"""Node label with the health of the node: Schedulable, Unschedulable, UnschedulablePendingReplacement or
UnschedulablePendingReboot."""
DEEP_HEALTH = "sagemaker.amazonaws.com/deep-health-check-status"
"""Node label with the result of the node's deep health check: InProgress, Passed or Failed. A node without a deep
health check does not have the label."""
COMPUTE_TYPE = "sagemaker.amazonaws.com/compute-type"
"""Node label with the value `hyperpod` on every node of HyperPod."""

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
"""Node labels of AWS with the position of the node in the network. Of the three network layers, nodes with the same
value for layer 3 are the closest."""

AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
MAX_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"

HPJOB = "HPJob"
"""Pod label with the name of the HyperPodPyTorchJob that the pod belongs to."""
OPERATOR_NAMESPACE = "aws-hyperpod"
OPERATOR_POD = "hp-training-control-plane"
KUBEFLOW_JOB = "training.kubeflow.org/job-name"
KUBEFLOW_RANK = "training.kubeflow.org/replica-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB = "hyperpod-ext/job"
"""Label of this project on all Kubernetes objects of a job, with the name of the job."""
DISK_VOLUME = "hyperpod-ext-disk"
"""Prefix of the names of volumes for disk tiers; a number follows the prefix."""
SECRET_VOLUME = "hyperpod-ext-secret"
"""Name of the pod volume with the job's secret."""
SECRET_DIR = "/var/run/hyperpod-ext"
"""Mount path of the volume SECRET_VOLUME in containers."""
ADDRESSES_VOLUME = "hyperpod-ext-addresses"
"""Name of the pod volume in which hyperpodrun stores the addresses that the operator sends."""
ADDRESSES_DIR = "/opt/ml/input/config"
"""Mount path of the volume ADDRESSES_VOLUME in containers. The folder is a volume because only root could create it in
most images."""
AGENT_PORT = 8080
"""TCP port on which hyperpodrun accepts commands of the operator, without authentication."""

EFA = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"
