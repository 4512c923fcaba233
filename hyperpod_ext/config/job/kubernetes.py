"""What only Kubernetes has: the section that targets hyperpod-eks and kubeflow share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.pods.fields import PodFields
from hyperpod_ext.config.names import DnsLabel, ObjectName


def _network(text: str) -> str:
    import ipaddress  # few specs name a network

    ipaddress.ip_network(text, strict=False)
    return text


Network = Annotated[str, AfterValidator(_network), Field(examples=["10.1.0.0/16"])]


class SecretEnv(Config):
    """A variable whose value is in a Secret of Kubernetes, and never in a spec."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["HF_TOKEN"])]
    """The variable: letters, digits and underscores, not starting with a digit."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["token"])]
    """Key in the Secret."""


class Kubernetes(Config):
    """What only Kubernetes has."""

    context: str | None = None
    """Context of the kubeconfig to submit with. Default: its current one."""
    namespace: DnsLabel | None = None
    """Namespace of the job. Default: that of the context, and `default` where it has none."""
    launcher: Literal["hyperpodrun", "ours"] = "hyperpodrun"
    """What serves the operator in the pods of target hyperpod-eks: AWS's hyperpodrun, or this project's agent, which
    mends most faults without the operator. Ours was never run on a real cluster. hyperpodrun must be in the image: the
    package `hyperpod-elastic-agent`, which needs torch < 2.12; ours needs nothing besides `hyperpod-ext[runtime]`."""
    operator_addresses: tuple[Network, ...] = ()
    """Networks that may give orders to the pods, with launcher `ours`, as `10.1.0.0/16`. Default: who gave the first
    order, until it is silent for a minute, and never the job's other pods; the NetworkPolicy lets only the operator's
    namespace reach that port."""
    kubeflow_api: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """Which of its two kinds target kubeflow makes: PyTorchJob (v1) or TrainJob (v2)."""
    training_runtime: ObjectName = "torch-distributed"
    """ClusterTrainingRuntime that a TrainJob builds on."""
    service_account: ObjectName | None = None
    """Service account of the pods: what they may do in AWS (IRSA, Pod Identity) and in Kubernetes."""
    secret_env: tuple[SecretEnv, ...] = ()
    """Variables whose values are in Secrets."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node fetches the image. Default: Kubernetes' own."""
    pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets with which the image is fetched."""
    job_secret: ObjectName | None = None
    """Secret whose key `secret` members of the job know each other by. Default: `NAME-OF-THE-JOB-hpx`, made with
    random bytes when the job is first submitted."""
    privileged: bool = False
    """Run containers privileged: they can then do anything to the node. Nothing here needs it, but AWS's
    checkpointless container changes the node's port range if it may."""
    host_network: bool = False
    """Use the node's own network: every port that the job opens is then open to all that reach the node."""
    fork_server: bool = True
    """On hyperpod-eks in mode `ours`, keep a process in each pod that has done the imports of `restart.preload`:
    `hyperpodrun` starts workers by a fork of it, and one that dies is back sooner by its imports."""
    network_policy: bool = True
    """Add a NetworkPolicy: only the HyperPod operator reaches the agent's port, and only pods of the job reach
    each other's."""
    clean_pods: Literal["all", "completed", "none"] = "all"
    """Which pods are deleted when the job has ended."""
    suspend: bool = False
    """Submit the job without starting it; Kueue, or a person, lets it go."""
    workload_mode: Annotated[str, Field(min_length=1)] | None = None
    """The operator's `workloadMode`, passed on as it is."""
    termination_grace_s: PositiveInt | None = None
    """Seconds between SIGTERM and SIGKILL of a pod. Default: what checkpoint.grace_s needs."""
    container: Annotated[dict[str, Any], PodFields("TrainingContainer")] = {}
    """Further fields of the container that trains, those of Kubernetes' Container: `lifecycle`, `livenessProbe`. All
    are in https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container."""
    pod: Annotated[dict[str, Any], PodFields("TrainingPod")] = {}
    """Further fields of each pod, those of Kubernetes' PodSpec: `initContainers`, `affinity`, `volumes`. All are in
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodSpec."""
