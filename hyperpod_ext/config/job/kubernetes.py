"""Section of a job's spec with settings of Kubernetes, for the targets hyperpod-eks and kubeflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.pods.fields import PodFields
from hyperpod_ext.config.names import DnsLabel, ObjectName


def _network(text: str) -> str:
    import ipaddress  # `ipaddress` is imported here because few specs need it

    ipaddress.ip_network(text, strict=False)
    return text


Network = Annotated[str, AfterValidator(_network), Field(examples=["10.1.0.0/16"])]


class SecretEnv(Config):
    """An environment variable whose value is in a Kubernetes Secret, not in the spec."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["HF_TOKEN"])]
    """Name of the variable: letters, digits and underscores, not starting with a digit."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["token"])]
    """Key of the value in the Secret."""


class Kubernetes(Config):
    """Settings of a job on Kubernetes."""

    context: str | None = None
    """Name of the kubeconfig context. Default: the current context."""
    namespace: DnsLabel | None = None
    """Namespace of the job. Default: the namespace of the kubeconfig context, or `default`."""
    launcher: Literal["hyperpodrun", "ours"] = "hyperpodrun"
    """Launcher in the pods of target hyperpod-eks; the HyperPod operator controls the launcher. `hyperpodrun`: AWS's
    launcher from the package `hyperpod-elastic-agent`, which must be in the image and needs torch < 2.12. `ours`: this
    project's agent, which recovers from most faults without the operator, but was never run on a real cluster. `ours`
    only needs `hyperpod-ext[runtime]` in the image."""
    operator_addresses: tuple[Network, ...] = ()
    """IP ranges, such as `10.1.0.0/16`, from which the pods accept commands of the operator. These IP ranges have an
    effect only with launcher `ours`. Default: the pods accept commands from the first address that sends one, until
    this address is silent for a minute. The job's other pods are never accepted as the operator. The job's
    NetworkPolicy allows only the operator's namespace to reach the port for commands."""
    kubeflow_api: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """Kind of job on target kubeflow: PyTorchJob (v1) or TrainJob (v2)."""
    training_runtime: ObjectName = "torch-distributed"
    """Name of the ClusterTrainingRuntime that a TrainJob refers to."""
    service_account: ObjectName | None = None
    """Service account of the pods, for permissions in AWS (IRSA, Pod Identity) and in Kubernetes."""
    secret_env: tuple[SecretEnv, ...] = ()
    """Environment variables whose values are in Kubernetes Secrets."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. Default: the default policy of Kubernetes."""
    pull_secrets: tuple[ObjectName, ...] = ()
    """Names of Kubernetes Secrets with the credentials to pull the image."""
    job_secret: ObjectName | None = None
    """Name of the Kubernetes Secret whose key `secret` authenticates the job's processes. Default:
    `NAME-OF-THE-JOB-hpx`, which is created with random bytes when the job is first submitted."""
    privileged: bool = False
    """Whether containers are privileged, with full access to the node. No job needs privileged containers. AWS's
    checkpointless container changes the port range of the node if it is privileged."""
    host_network: bool = False
    """Whether pods use the network of the node. With `host_network`, every program that can reach the node can reach
    every port of the job."""
    fork_server: bool = True
    """Whether each pod keeps a process that has imported the modules in `restart.preload`, on target hyperpod-eks in
    mode `ours`. `hyperpodrun` forks replacement workers from the process with the imports."""
    network_policy: bool = True
    """Whether to add a NetworkPolicy. The NetworkPolicy lets only the HyperPod operator reach the port of the agent,
    and only pods of the same job reach the other ports."""
    clean_pods: Literal["all", "completed", "none"] = "all"
    """Which pods are deleted when the job has ended."""
    suspend: bool = False
    """Whether to submit the job without starting it. Kueue or a user starts the job later."""
    workload_mode: Annotated[str, Field(min_length=1)] | None = None
    """Value for the operator's field `workloadMode`, which is passed on unchanged."""
    termination_grace_s: PositiveInt | None = None
    """Seconds between SIGTERM and SIGKILL of a pod. Default: enough for the upload of `checkpoint.grace_s` seconds."""
    container: Annotated[dict[str, Any], PodFields("TrainingContainer")] = Field(default={}, validate_default=False)
    """Additional fields of the training container, by their names in Kubernetes' type Container, such as `lifecycle` or
    `livenessProbe`. All fields are listed at
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container."""
    pod: Annotated[dict[str, Any], PodFields("TrainingPod")] = Field(default={}, validate_default=False)
    """Additional fields of each pod, by their names in Kubernetes' type PodSpec, such as `initContainers`, `affinity`
    or `volumes`. All fields are listed at
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodSpec."""
