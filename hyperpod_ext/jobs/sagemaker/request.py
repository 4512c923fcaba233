"""Renders a JobConfig as a CreateTrainingJob request, which boto3 sends. Pure.

The container starts as SageMaker's framework images expect. Hyperparameters, each a JSON value, name the script
(`sagemaker_program`) and the archive with its folder (`sagemaker_submit_directory`). Both versions of the SageMaker SDK
send an equivalent request: sagemaker 2.x has the same members, sagemaker 3.x sends the code as channels.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog.labels import JOB as TAG
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.sagemaker import FileSystemChannel, S3Channel
from hyperpod_ext.jobs.sagemaker.container import arguments_of, entrypoint_of, environment_of
from hyperpod_ext.jobs.sagemaker.overlay import with_overlay

Request = dict[str, Any]

ARCHIVE = "sourcedir.tar.gz"
CODE_CHANNEL = "code"
DEFAULT_RUN_S = 86400
_LOG_LEVEL = "20"


def training_job_request(job: JobConfig, job_name: str | None = None) -> Request:
    """Return the request for a valid `job`, including the members that its overlay adds.

    Args:
        job_name: unique name of the training job; None means the name in the spec.
    """
    return with_overlay(plain_request(job, job_name), job.overlay.sagemaker.request)


def plain_request(job: JobConfig, job_name: str | None = None) -> Request:
    """Return the request for a valid `job`, without the members that its overlay adds.

    Args:
        job_name: unique name of the training job; None means the name in the spec.
    """
    name, options = job_name or job.name, job.sagemaker
    request: Request = {
        "TrainingJobName": name,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(job),
        "HyperParameters": hyperparameters(job, name),
        "InputDataConfig": _channels(job, name),
        "OutputDataConfig": given(
            S3OutputPath=options.output,
            KmsKeyId=options.output_kms_key,
            CompressionType=None if options.compress_output else "NONE",
        ),
        "ResourceConfig": _resources(job),
        "StoppingCondition": given(
            MaxRuntimeInSeconds=job.timeouts.run_s or DEFAULT_RUN_S,
            MaxWaitTimeInSeconds=_wait_s(job),
            MaxPendingTimeInSeconds=options.max_pending_s,
        ),
        "Environment": environment_of(job),
        "Tags": tags(job),
        "VpcConfig": vpc(job),
        "EnableNetworkIsolation": options.network_isolation or None,
        "EnableInterContainerTrafficEncryption": options.encrypt_traffic or None,
        "EnableManagedSpotTraining": options.spot or None,
        "CheckpointConfig": checkpoint(job),
        "RetryStrategy": {"MaximumRetryAttempts": job.relaunch.max_times} if job.relaunch.max_times else None,
        "ExperimentConfig": experiment(job),
        "ProfilerConfig": {"DisableProfiler": not options.profiler}
        | ({"S3OutputPath": options.output} if options.profiler else {}),
        "RemoteDebugConfig": {"EnableRemoteDebug": True} if options.remote_debug else None,
        "InfraCheckConfig": {"EnableInfraCheck": True} if options.infra_check else None,
    }
    return {member: value for member, value in request.items() if value not in (None, [], {})}


def submitted_as(request: Mapping[str, Any], job_name: str) -> Request:
    """Return a copy of `request` with another name, and with the S3 URI of the code, which contains the name."""
    before = str(request["TrainingJobName"])
    changed: Request = copy.deepcopy(dict(request))
    changed["TrainingJobName"] = job_name
    output = changed["OutputDataConfig"]["S3OutputPath"]
    old, new = code_uri(output, before), code_uri(output, job_name)
    if "HyperParameters" in changed:
        values = changed["HyperParameters"]
        values |= {key: json.dumps(new) for key, value in values.items() if value == json.dumps(old)}
        values |= {"sagemaker_job_name": json.dumps(job_name)}
    for channel in changed.get("InputDataConfig", []):
        source = channel["DataSource"].get("S3DataSource", {})
        if source.get("S3Uri") == old:
            source["S3Uri"] = new
    return changed


def code_uri(output: str, job_name: str) -> str:
    """Return the S3 URI to which the code of a training job is uploaded.

    Args:
        output: S3 prefix of the job's output.
    """
    return f"{output.rstrip('/')}/{job_name}/source/{ARCHIVE}"


def hyperparameters(job: JobConfig, job_name: str) -> dict[str, str]:
    """Return the hyperparameters that SageMaker's framework images read, each with its value as JSON text."""
    options = job.sagemaker
    isolated = f"/opt/ml/input/data/{CODE_CHANNEL}/{ARCHIVE}"
    values: dict[str, Any] = {
        "sagemaker_submit_directory": isolated if options.network_isolation else _code(job, job_name),
        "sagemaker_program": job.script,
        "sagemaker_container_log_level": int(_LOG_LEVEL),
        "sagemaker_job_name": job_name,
    }
    if options.region is not None:
        values["sagemaker_region"] = options.region
    if job.mode == "plain":
        values |= arguments_of(job)
        values["sagemaker_torch_distributed_enabled"] = True
        if not job.node_groups:
            values["sagemaker_instance_type"] = job.resources.instance_type
    return {name: json.dumps(value) for name, value in values.items()}


def tags(job: JobConfig) -> list[dict[str, str]]:
    """Return the tags of the training job: the name in the spec, `labels`, and `sagemaker.tags`."""
    found = {TAG: job.name, **job.labels, **job.sagemaker.tags}
    return [{"Key": key, "Value": value} for key, value in found.items()]


def vpc(job: JobConfig) -> Request | None:
    """Return the request's VpcConfig, with subnets and security groups; None without `sagemaker.vpc`."""
    asked = job.sagemaker.vpc
    return None if asked is None else {"Subnets": list(asked.subnets), "SecurityGroupIds": list(asked.security_groups)}


def checkpoint(job: JobConfig) -> Request | None:
    """Return the request's CheckpointConfig, or None without `sagemaker.checkpoint_uri`.

    The CheckpointConfig contains the S3 prefix that SageMaker synchronises with a folder of the container.
    """
    uri = job.sagemaker.checkpoint_uri
    return {"S3Uri": uri, "LocalPath": job.sagemaker.checkpoint_path} if uri else None


def experiment(job: JobConfig) -> Request | None:
    """Return the request's ExperimentConfig; None without `sagemaker.experiment`."""
    asked = job.sagemaker.experiment
    return None if asked is None else given(ExperimentName=asked.name, TrialName=asked.trial, RunName=asked.run)


def channel(asked: S3Channel | FileSystemChannel) -> Request:
    """Return an input channel as a member of the request, without the channel's name."""
    if asked.kind == "file-system":
        source = {
            "FileSystemDataSource": {
                "FileSystemId": asked.id,
                "FileSystemAccessMode": asked.access,
                "FileSystemType": asked.type,
                "DirectoryPath": asked.directory,
            }
        }
        return {"DataSource": source}
    source = {
        "S3DataSource": {"S3DataType": asked.data, "S3Uri": asked.uri, "S3DataDistributionType": asked.distribution}
    }
    form = given(InputMode=asked.mode, ContentType=asked.content_type, CompressionType=asked.compression)
    return {"DataSource": source, **form}


def _algorithm(job: JobConfig) -> Request:
    metrics = [{"Name": metric.name, "Regex": metric.regex} for metric in job.sagemaker.metrics]
    return given(
        TrainingImage=job.image,
        TrainingInputMode="File",
        MetricDefinitions=metrics or None,
        **entrypoint_of(job),
    )


def _channels(job: JobConfig, job_name: str) -> list[Request]:
    found = [{"ChannelName": name, **channel(asked)} for name, asked in job.sagemaker.channels.items()]
    if job.sagemaker.network_isolation:
        source = {
            "S3DataType": "S3Prefix",
            "S3Uri": _code(job, job_name),
            "S3DataDistributionType": "FullyReplicated",
        }
        found.append({"ChannelName": CODE_CHANNEL, "DataSource": {"S3DataSource": source}})
    return found


def _resources(job: JobConfig) -> Request:
    options = job.sagemaker
    groups = [
        {
            "InstanceGroupName": group.name,
            "InstanceType": group.instance_type or job.resources.instance_type,
            "InstanceCount": group.nodes,
        }
        for group in job.node_groups
    ]
    instances = {} if groups else {"InstanceType": job.resources.instance_type, "InstanceCount": job.nodes}
    return instances | given(
        InstanceGroups=groups or None,
        VolumeSizeInGB=options.volume_gib or 30,
        VolumeKmsKeyId=options.volume_kms_key,
        KeepAlivePeriodInSeconds=options.keep_alive_s,
        TrainingPlanArn=options.training_plan,
    )


def _wait_s(job: JobConfig) -> int | None:
    if not job.sagemaker.spot:
        return None
    return job.sagemaker.max_wait_s or job.timeouts.run_s or DEFAULT_RUN_S


def _code(job: JobConfig, job_name: str) -> str:
    return job.sagemaker.code or code_uri(job.sagemaker.output or "", job_name)


def given(**members: Any) -> Request:
    """Return the keyword arguments whose value is not None."""
    return {name: value for name, value in members.items() if value is not None}
