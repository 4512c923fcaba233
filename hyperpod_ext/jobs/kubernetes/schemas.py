"""Schemas of custom resources, with which rendered files are checked before submission.

The definition of HyperPodPyTorchJob is not public, so its schema follows AWS's documentation and client. Of a pod's
spec, only `containers` is checked here, and of a container only `name`, `image`, `command`, `args` and `env`; the API
server checks all other fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.contract.yaml_text import read_all

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class SchemaModel(BaseModel):
    """Base of models that refuse unknown fields, because the API server would drop unknown fields silently."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(SchemaModel):
    name: Name
    namespace: Name | None = None
    labels: dict[str, Annotated[str, Field(max_length=63)]] = {}
    annotations: dict[str, str] = {}


class EnvVar(SchemaModel):
    name: Annotated[str, Field(min_length=1)]
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Container(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, alias_generator=to_camel)

    name: Name
    image: Annotated[str, Field(min_length=1)]
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []


class PodSpec(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, alias_generator=to_camel)

    containers: Annotated[list[Container], Field(min_length=1)]


class PodTemplate(SchemaModel):
    metadata: dict[str, Any] = {}
    spec: PodSpec


class LogMonitoring(SchemaModel):
    name: str
    log_pattern: str
    stop_pattern: str | None = None
    expected_start_cut_off_in_seconds: Count | None = None
    expected_recurring_frequency_in_seconds: Count | None = None
    metric_threshold: float | None = None
    operator: Literal["gt", "gteq", "lt", "lteq", "eq"] | None = None
    metric_evaluation_data_points: Positive | None = None
    fault_on_match: bool | None = None


class RestartLimits(SchemaModel):
    eval_period_seconds: Positive
    num_restart_before_full_job_restart: Count | None = None
    max_full_job_restarts: Count | None = None
    max_num_repeat_offenders_to_avoid: Count | None = None
    scale_up_snooze_time_in_seconds: Count | None = None


class HyperPodRunPolicy(SchemaModel):
    clean_pod_policy: Literal["All", "OnlyComplete", "None"] | None = None
    job_max_retry_count: Count | None = None
    restart_policy: RestartLimits | None = None
    active_deadline_seconds: Positive | None = None
    startup_deadline_seconds: Positive | None = None
    fault_deadline_seconds: Positive | None = None
    ttl_seconds_after_finished: Annotated[int, Field(ge=-1)] | None = None
    suspend: bool | None = None
    workload_mode: str | None = None
    log_monitoring_configuration: list[LogMonitoring] = []


class HyperPodElasticPolicy(SchemaModel):
    min_replicas: Count
    max_replicas: Positive
    replica_increment_step: Positive | None = None
    replica_discrete_values: list[Positive] | None = None
    scaling_timeout_in_seconds: Count | None = None
    graceful_shutdown_timeout_in_seconds: Count | None = None
    faulty_scale_down_timeout_in_seconds: Count | None = None


class HyperPodReplicas(SchemaModel):
    name: Name
    replicas: Count = 0
    max_replicas: Positive | None = None
    spares: Count = 0
    template: PodTemplate


class HyperPodSpec(SchemaModel):
    nproc_per_node: Annotated[str, Field(pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")] = "auto"
    replica_specs: Annotated[list[HyperPodReplicas], Field(min_length=1)]
    run_policy: HyperPodRunPolicy | None = None
    elastic_policy: HyperPodElasticPolicy | None = None


class HyperPodPyTorchJob(SchemaModel):
    api_version: Literal["sagemaker.amazonaws.com/v1"]
    kind: Literal["HyperPodPyTorchJob"]
    metadata: Metadata
    spec: HyperPodSpec


class KubeflowReplicas(SchemaModel):
    replicas: Count
    restart_policy: Literal["Always", "OnFailure", "Never", "ExitCode"] | None = None
    template: PodTemplate


class ReplicaTypes(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    Master: KubeflowReplicas | None = None
    Worker: KubeflowReplicas | None = None


class KubeflowRunPolicy(SchemaModel):
    clean_pod_policy: Literal["All", "Running", "None"] | None = None
    ttl_seconds_after_finished: Count | None = None
    active_deadline_seconds: Positive | None = None
    backoff_limit: Count | None = None
    suspend: bool | None = None
    scheduling_policy: dict[str, Any] | None = None
    managed_by: str | None = None


class KubeflowElasticPolicy(SchemaModel):
    min_replicas: Count
    max_replicas: Positive
    max_restarts: Count | None = None
    rdzv_backend: str | None = None
    rdzv_host: str | None = None
    rdzv_port: Positive | None = None
    rdzv_id: str | None = None
    rdzv_conf: list[dict[str, str]] | None = None
    standalone: bool | None = None
    metrics: list[dict[str, Any]] | None = None
    """Metrics for a HorizontalPodAutoscaler of the job."""


class PyTorchJobSpec(SchemaModel):
    nproc_per_node: Annotated[str, Field(pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")] | None = None
    run_policy: KubeflowRunPolicy | None = None
    elastic_policy: KubeflowElasticPolicy | None = None
    pytorch_replica_specs: ReplicaTypes


class PyTorchJob(SchemaModel):
    api_version: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: PyTorchJobSpec


class RuntimeRef(SchemaModel):
    name: Name
    api_group: str | None = None
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] | None = None


class Trainer(SchemaModel):
    image: str | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    num_nodes: Positive | None = None
    num_proc_per_node: Positive | None = None
    resources_per_node: dict[str, dict[str, str]] | None = None


class TrainJobSpec(SchemaModel):
    runtime_ref: RuntimeRef
    trainer: Trainer | None = None
    runtime_patches: list[dict[str, Any]] = []
    suspend: bool | None = None
    managed_by: str | None = None
    active_deadline_seconds: Positive | None = None


class TrainJob(SchemaModel):
    api_version: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: Metadata
    spec: TrainJobSpec


class NetworkPolicy(SchemaModel):
    api_version: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: dict[str, Any]


_MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model for model in (HyperPodPyTorchJob, PyTorchJob, TrainJob, NetworkPolicy)
}


def check_yaml(name: str, text: str) -> list[dict[str, Any]]:
    """Parse a rendered file, check each object against the schema of its kind, and return the objects.

    Args:
        name: name of the file for messages.

    Raises:
        ConfigError: an operator would refuse or drop a field. The error names every wrong field.
    """
    try:
        objects = [found for found in read_all(text) if found is not None]
    except yaml.YAMLError as error:
        raise ConfigError([Problem(f"is not YAML: {error}", source=name)]) from None
    problems = [problem for found in objects for problem in find_problems(name, found)]
    if problems:
        raise ConfigError(problems)
    return objects


def find_problems(name: str, found: object) -> list[Problem]:
    """Return the problems of one object, checked against the schema of its kind.

    Args:
        name: name of the object's file for messages.
        found: the object.
    """
    kind = str(found.get("kind")) if isinstance(found, dict) else "nothing"
    if kind not in _MODELS:
        return [
            Problem(
                f"`{kind}` is not a kind that hp-ext submits", path="kind", source=name, hint=suggest(kind, _MODELS)
            )
        ]
    try:
        _MODELS[kind].model_validate(found)
    except ValidationError as error:
        return [
            Problem(_words(detail), path=dotted(detail["loc"]), source=name)
            for detail in error.errors(include_url=False)
        ]
    return []


def _words(detail: Any) -> str:
    known = {"extra_forbidden": "is not a known field", "missing": "is missing"}
    return known.get(detail["type"]) or str(detail["msg"])
