"""Checks of `hp-ext doctor`: this machine, and the reachable cluster. Read-only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from hyperpod_ext.catalog.age import ages, stale
from hyperpod_ext.errors import HyperpodExtError, NotFoundError

_PACKAGES = {
    "torch": "to run jobs on this machine (target local)",
    "awscrt": "to run jobs on this machine; pip install 'hyperpod-ext[runtime]'",
    "cryptography": "for checkpoints in S3 and in directories; pip install 'hyperpod-ext[runtime]'",
    "boto3": "for SageMaker and for checkpoints in S3; pip install 'hyperpod-ext[sagemaker]'",
    "sagemaker": "for the estimator helper",
}
_PROGRAMS = {"sbatch": "to submit to Slurm from here", "aws": "to sign in to EKS"}
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of one check of `hp-ext doctor`."""

    state: Literal["ok", "absent", "old", "WRONG"]
    what: str
    finding: str
    hint: str = ""


def look_here() -> Iterator[Examined]:
    """Check the Python packages and the programs that are installed on this machine."""
    yield Examined("ok", "python", platform.python_version())
    for name, purpose in _PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            yield Examined("absent", name, f"needed {purpose}")
        else:
            yield Examined("ok", name, _version(name))
    yield from _sagemaker_is_complete()
    for program, purpose in _PROGRAMS.items():
        path = shutil.which(program)
        yield Examined("ok", program, path) if path else Examined("absent", program, f"needed {purpose}")
    yield from look_at_catalog(datetime.now(UTC).date())


def look_at_catalog(today: date) -> Iterator[Examined]:
    """Check the age of the facts about AWS in hp-ext's catalog, such as instance types and images."""
    old = stale(today)
    for one in old:
        hint = "`make catalog` refreshes facts that packages contain; a newer release of hyperpod-ext has the others"
        yield Examined("old", f"catalog/{one.file}", f"from {one.dated}, {one.days} days ago", hint)
    if not old:
        oldest = max(ages(today), key=lambda one: one.days)
        yield Examined("ok", "catalog", f"the oldest facts about AWS are from {oldest.dated}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def _sagemaker_is_complete() -> Iterator[Examined]:
    """Check that sagemaker-hyperpod has not replaced the __init__.py of sagemaker 2 with an empty file."""
    spec = importlib.util.find_spec("sagemaker")
    if spec and spec.origin and _version("sagemaker").startswith("2.") and not Path(spec.origin).read_bytes():
        hint = "pip uninstall sagemaker-hyperpod, then pip install --force-reinstall 'sagemaker<3'"
        yield Examined("WRONG", "sagemaker", "its __init__.py is empty: another package has overwritten it", hint)


def look_at_cluster(context: str | None) -> Iterator[Examined]:
    """Check that the kubeconfig's Kubernetes API answers, and that the cluster's operators know every rendered field.

    Args:
        context: context of the kubeconfig; None uses its current context.
    """
    from hyperpod_ext.jobs.kubernetes.api.client import Client
    from hyperpod_ext.jobs.kubernetes.api.kubeconfig import load_access
    from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, PYTORCH, TRAIN

    try:
        client = Client(load_access(context))
        version = client.get("/version").get("gitVersion", "of an unknown version")
    except HyperpodExtError as error:
        yield Examined("absent", "kubernetes", error.message, error.hint)
        return
    yield Examined("ok", "kubernetes", f"{version} at {client.access.server}, namespace {client.access.namespace}")
    for kind in (HYPERPOD, PYTORCH, TRAIN):
        try:
            crd = client.get(f"{_CRDS}/{kind.plural}.{kind.group}")
        except NotFoundError:
            yield Examined("absent", kind.name, f"the cluster does not have it; needed for target {kind.target}")
        except HyperpodExtError as error:
            yield Examined("absent", kind.name, error.message, error.hint)
        else:
            yield from _fields_of(kind.name, kind.version, crd)
    try:
        client.get(f"{_CRDS}/localqueues.kueue.x-k8s.io")
        yield Examined("ok", "Kueue", "scheduling.queue, topology and spares can be used")
    except HyperpodExtError:
        yield Examined("absent", "Kueue", "needed for scheduling.queue, topology and spares")


def _fields_of(name: str, version: str, crd: Mapping[str, Any]) -> Iterator[Examined]:
    """Check that the cluster's definition of kind `name` has every field that hp-ext renders.

    Args:
        version: version of the kind's API that hp-ext renders.
        crd: CustomResourceDefinition of the kind in the cluster.
    """
    from hyperpod_ext.jobs.kubernetes import schemas

    versions = {one.get("name"): one for one in (crd.get("spec") or {}).get("versions") or []}
    if version not in versions:
        listed = ", ".join(map(str, versions)) or "none"
        yield Examined("WRONG", name, f"the cluster has {listed}, not {version}", "update the operator, or hp-ext")
        return
    live = ((versions[version].get("schema") or {}).get("openAPIV3Schema") or {}).get("properties", {}).get(
        "spec"
    ) or {}
    model: type[BaseModel] = getattr(schemas, name).model_fields["spec"].annotation
    missing = list(_missing(model, live, "spec"))
    if missing:
        hint = "update the operator: it would refuse or drop these fields"
        yield Examined("WRONG", name, f"the operator has no {', '.join(missing)}", hint)
    else:
        yield Examined("ok", name, f"{version}; accepts every rendered field")


def _missing(model: type[BaseModel], live: Mapping[str, Any], path: str) -> Iterator[str]:
    from hyperpod_ext.config.files.schema_path import models_in

    if live.get("x-kubernetes-preserve-unknown-fields") or not live.get("properties"):
        return
    for name, info in model.model_fields.items():
        key = info.alias or name
        found = live["properties"].get(key)
        if found is None:
            yield f"{path}.{key}"
            continue
        inner = models_in(info.annotation) or [
            m for part in getattr(info.annotation, "__args__", ()) for m in models_in(part)
        ]
        if inner and not issubclass(inner[0], _kubernetes_models()):
            yield from _missing(inner[0], found.get("items") or found, f"{path}.{key}")


def _kubernetes_models() -> tuple[type[BaseModel], ...]:
    """Return the models of Kubernetes' own types, whose fields are not checked because every operator accepts them."""
    from hyperpod_ext.jobs.kubernetes import schemas

    return schemas.PodTemplate, schemas.EnvVar
