"""Settings of Kubernetes, for targets hyperpod-eks and kubeflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.pods.fields import PodFields
from hyperpod_ext.config.names import DnsLabel, ObjectName


def _network(text: str) -> str:
    import ipaddress  # imported here because few specs need it

    ipaddress.ip_network(text, strict=False)
    return text


Network = Annotated[str, AfterValidator(_network), Field(examples=["10.1.0.0/16"])]


class SecretEnv(Config):
    """A variable whose value is in a Secret of Kubernetes, not in the spec."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["HF_TOKEN"])]
    """The variable: letters, digits and underscores, not starting with a digit."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["token"])]
    """Key in the Secret."""


class Kubernetes(Config):
    """Settings of Kubernetes."""

    context: str | None = None
    """Context of the kubeconfig. Default: the current context."""
    namespace: DnsLabel | None = None
    """Namespace of the job. Default: the context's namespace, or `default`."""
    launcher: Literal["hyperpodrun", "ours"] = "hyperpodrun"
    """Launcher in the pods of target hyperpod-eks, which the operator controls: AWS's hyperpodrun, or this project's
    agent, which recovers from most faults without the operator but was never run on a real cluster. hyperpodrun is the
    package `hyperpod-elastic-agent` in the image, and needs torch < 2.12; ours only needs `hyperpod-ext[runtime]`."""
    operator_addresses: tuple[Network, ...] = ()
    """Networks whose commands the pods accept, with launcher `ours`, as `10.1.0.0/16`. Default: the first address that
    sends a command, until it is silent for a minute, but never the job's other pods. The NetworkPolicy lets only the
    operator's namespace reach that port."""
    kubeflow_api: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """Kind of job on target kubeflow: PyTorchJob (v1) or TrainJob (v2)."""
    training_runtime: ObjectName = "torch-distributed"
    """ClusterTrainingRuntime that a TrainJob builds on."""
    service_account: ObjectName | None = None
    """Service account of the pods, for permissions in AWS (IRSA, Pod Identity) and in Kubernetes."""
    secret_env: tuple[SecretEnv, ...] = ()
    """Variables whose values are in Secrets."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. Default: Kubernetes' default."""
    pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets to pull the image."""
    job_secret: ObjectName | None = None
    """Secret whose key `secret` authenticates the job's processes. Default: `NAME-OF-THE-JOB-hpx`, made with random
    bytes when the job is first submitted."""
    privileged: bool = False
    """Run privileged containers, with full access to the node. Not needed, but AWS's checkpointless container then
    changes the node's port range."""
    host_network: bool = False
    """Use the node's own network. Every port of the job is then reachable by all who can reach the node."""
    fork_server: bool = True
    """On hyperpod-eks in mode `ours`, keep a process in each pod that has imported `restart.preload`. `hyperpodrun`
    forks workers from it, so a replacement worker skips the imports."""
    network_policy: bool = True
    """Add a NetworkPolicy: only the HyperPod operator reaches the agent's port, and only pods of the job reach
    each other's."""
    clean_pods: Literal["all", "completed", "none"] = "all"
    """Pods to delete when the job has ended."""
    suspend: bool = False
    """Submit the job without starting it. Kueue or a user starts it later."""
    workload_mode: Annotated[str, Field(min_length=1)] | None = None
    """The operator's `workloadMode`, passed on unchanged."""
    termination_grace_s: PositiveInt | None = None
    """Seconds between SIGTERM and SIGKILL of a pod. Default: enough for checkpoint.grace_s."""
    container: Annotated[dict[str, Any], PodFields("TrainingContainer")] = Field(default={}, validate_default=False)
    """Additional fields of the training container, by their names in Kubernetes' Container: `lifecycle`,
    `livenessProbe`. All are in
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container."""
    pod: Annotated[dict[str, Any], PodFields("TrainingPod")] = Field(default={}, validate_default=False)
    """Additional fields of each pod, by their names in Kubernetes' PodSpec: `initContainers`, `affinity`, `volumes`.
    All are in https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodSpec."""
