"""Fills unset fields of a job's spec from the CloudFormation outputs of the cluster that the spec names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.clusters.cdk.outputs import ClusterOutputs, fetch, keep, recall
from hyperpod_ext.config.files.document import Document, SourceLocation
from hyperpod_ext.config.files.load import read
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.kubernetes import Kubernetes
from hyperpod_ext.config.job.sagemaker import SageMaker
from hyperpod_ext.config.job.scheduling import Scheduling
from hyperpod_ext.errors import ConfigError, NotFoundError, Problem

_KUBERNETES = frozenset({"hyperpod-eks", "kubeflow"})


def outputs_for(document: Document, spec_folder: Path) -> tuple[ClusterOutputs, bool] | None:
    """Return the outputs of the cluster that a job's spec names. The outputs come from a stored file, or from AWS.

    Args:
        spec_folder: folder of the spec file, in which a team may have stored the outputs.

    Returns:
        The outputs, and True if they come from a stored file. None if the spec names no cluster.

    Raises:
        ConfigError: the cluster does not exist.
        UnreachableError: no outputs are stored, and AWS cannot be reached.
    """
    data = document.data
    name = data.get("cluster") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name:
        return None  # an invalid cluster name is reported by the validation of the spec
    if (kept := recall(name, spec_folder)) is not None:
        return kept, True
    options = data.get("sagemaker") if isinstance(data, dict) else None
    region = options.get("region") if isinstance(options, dict) else None
    try:
        found = fetch(name, region if isinstance(region, str) else None)
    except NotFoundError as error:
        raise ConfigError([document.problem(("cluster",), error.message, error.hint)]) from None
    keep(found)
    return found, False


def fill(document: Document, outputs: ClusterOutputs) -> None:
    """Set the URI of each S3 tier without a URI in a job's spec, from the outputs of the cluster."""
    if (uri := checkpoint_uri(outputs)) is None:
        return
    source = f"cluster {outputs.name}"
    for index, tier in _tiers_without_place(document.data):
        tier["uri"] = uri
        document.locations[("checkpoint", "tiers", index, "uri")] = SourceLocation(source)


def checkpoint_uri(outputs: ClusterOutputs) -> str | None:
    """Return the S3 URI below which the cluster's jobs store checkpoints, `s3://bucket/prefix`; None if unknown."""
    bucket, prefix = outputs.get("CheckpointBucket"), (outputs.get("CheckpointPrefix") or "").strip("/")
    return bucket and "/".join(["s3:/", bucket, *([prefix] if prefix else [])])


def on_cluster(job: JobConfig, outputs: ClusterOutputs, target: str | None) -> JobConfig:
    """Return `job` with the unset fields that `target` needs filled from the outputs of the job's cluster. Pure.

    Args:
        target: name of the target. None: fill the fields for Kubernetes and Slurm, which rules read.

    Raises:
        ConfigError: the value of an output is not valid for its field, for example because another app created the
            stack.
    """
    changes: dict[str, Any] = {}
    if target is None or target in _KUBERNETES:
        given = {"namespace": outputs.get("Namespace"), "service_account": outputs.get("ServiceAccount")}
        if job.kubernetes.namespace not in (None, given["namespace"]):
            # the cluster's service account does not exist in the job's namespace, so do not fill it in
            given["service_account"] = None
        changes["kubernetes"] = _with(Kubernetes, job.kubernetes, given, outputs)
    if target is None or target in _KUBERNETES | {"hyperpod-slurm"}:
        changes["scheduling"] = _with(Scheduling, job.scheduling, {"queue": outputs.get("QueueName")}, outputs)
    if target == "sagemaker":
        changes["sagemaker"] = _with(SageMaker, job.sagemaker, dict(_of_sagemaker(job, outputs)), outputs)
    return job.model_copy(update=changes)


def _of_sagemaker(job: JobConfig, outputs: ClusterOutputs) -> Iterator[tuple[str, Any]]:
    yield "region", outputs.region or None
    if uri := checkpoint_uri(outputs):
        yield "output", f"{uri}/{job.name}-output"
    subnets, groups = outputs.items("SubnetIds"), outputs.items("SecurityGroupIds")
    if subnets and groups:
        yield "vpc", {"subnets": list(subnets), "security_groups": list(groups)}


def _with(model: Any, section: Any, given: dict[str, Any], outputs: ClusterOutputs) -> Any:
    """Return the section `section` of a job's spec with its unset fields filled from `given`."""
    import json

    from pydantic import ValidationError

    open_ = {name: value for name, value in given.items() if value is not None and getattr(section, name) is None}
    if not open_:
        return section
    try:
        return model.model_validate_json(json.dumps(section.model_dump(mode="json", exclude_unset=True) | open_))
    except ValidationError as error:
        source = f"cluster {outputs.name}"
        raise ConfigError(
            [Problem(f"the value `{one['input']}` of {source} is not valid: {one['msg']}",
                     path=".".join(map(str, one["loc"])))
             for one in error.errors(include_url=False)]
        ) from None  # fmt: skip


def load_job(path: str | Path, target: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Load a job's spec as `hp-ext` loads it for a submission to `target`, with values from the job's cluster.

    Raises:
        ConfigError: the spec has mistakes, or names an unknown cluster.
        UnreachableError: the outputs of the cluster are not stored, and AWS cannot be reached.
    """
    known: list[ClusterOutputs] = []

    def from_cluster(document: Document) -> None:
        if found := outputs_for(document, Path(path).parent):
            known.append(found[0])
            fill(document, found[0])

    job = read(JobConfig, path, overrides, from_cluster).config
    return on_cluster(job, known[0], target) if known else job


def _tiers_without_place(data: object) -> Iterator[tuple[int, dict[str, object]]]:
    policy = data.get("checkpoint") if isinstance(data, dict) else None
    tiers = policy.get("tiers") if isinstance(policy, dict) else None
    for index, tier in enumerate(tiers if isinstance(tiers, list) else []):
        if isinstance(tier, dict) and tier.get("kind") == "s3" and not tier.get("uri"):
            yield index, tier
