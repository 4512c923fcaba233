"""Kinds of custom resources for training jobs, such as PyTorchJob, and the states of their objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.jobs.contract.capabilities import OF_PODS

if TYPE_CHECKING:
    from hyperpod_ext.config.job.job import JobConfig

_SUCCEEDED = frozenset({"succeeded", "completed", "complete"})
_STATES = {"running": "running", "podsrunning": "running", "restarting": "running", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of custom resource that describes a training job."""

    target: str
    group: str
    version: str
    plural: str
    name: str
    """Value of `kind:` in the objects of this kind."""
    pod_label: str
    """Key of the pods' label whose value is the job's name."""
    container: str
    """Name of the training container in the pods. Kubeflow prescribes the name of the container for its kinds."""

    @property
    def api_version(self) -> str:
        """Value of `apiVersion:` in the objects of this kind."""
        return f"{self.group}/{self.version}"

    def path(self, namespace: str, name: str = "") -> str:
        """Return the API path of all objects of this kind in a namespace; with `name`, the path of one object."""
        return f"/apis/{self.api_version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


HYPERPOD = Kind(
    "hyperpod-eks", "sagemaker.amazonaws.com", "v1", "hyperpodpytorchjobs", "HyperPodPyTorchJob", labels.HPJOB, "worker"
)
PYTORCH = Kind("kubeflow", "kubeflow.org", "v1", "pytorchjobs", "PyTorchJob", labels.KUBEFLOW_JOB, "pytorch")
TRAIN = Kind("kubeflow", "trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", labels.JOBSET, "node")

READS = frozenset({*OF_PODS, "labels", "annotations", "kubernetes"})
"""Optional parts of a spec that targets on Kubernetes read."""


def kind_for(target: str, job: JobConfig) -> Kind:
    """Return the kind of object as which `job` is submitted to `target`."""
    if target == HYPERPOD.target:
        return HYPERPOD
    return TRAIN if job.kubernetes.kubeflow_api == "trainjob" else PYTORCH


def kinds_of(target: str) -> tuple[Kind, ...]:
    """Return the kinds of objects that jobs of a target can be."""
    return tuple(kind for kind in (HYPERPOD, PYTORCH, TRAIN) if kind.target == target)


def state_of(found: Mapping[str, Any]) -> str:
    """Return the state of a job, derived from its object's conditions: starting, running, succeeded or failed.

    Unknown conditions are ignored, because newer operators may have more conditions.
    """
    status = _mapping(found.get("status"))
    true = [
        str(condition.get("type", "")).lower()
        for condition in _conditions(status)
        if str(condition.get("status", "True")) == "True"
    ]
    if _SUCCEEDED & set(true):
        return "succeeded"
    if "failed" in true:
        return "failed"
    return next((_STATES[kind] for kind in reversed(true) if kind in _STATES), "starting")


def reason_of(found: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the operator's reason for the failure of a job, as an error; None if the job has not failed."""
    for condition in reversed(_conditions(_mapping(found.get("status")))):
        if str(condition.get("type", "")).lower() == "failed":
            words = [str(condition[key]) for key in ("reason", "message") if condition.get(key)]
            message = ": ".join(words) or "the operator reports no reason"
            return {"code": "JobFailedError", "message": message, "hint": "see its logs with `hp-ext logs`"}
    return None


def ended_at(found: Mapping[str, Any]) -> str | None:
    """Return the time at which the job ended; None for a job that has not ended."""
    status = _mapping(found.get("status"))
    if time := status.get("completionTime"):
        return str(time)
    last = [c for c in _conditions(status) if str(c.get("type", "")).lower() in _SUCCEEDED | {"failed"}]
    return str(last[-1]["lastTransitionTime"]) if last and last[-1].get("lastTransitionTime") else None


def _conditions(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = status.get("conditions")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
