"""From a CreateTrainingJob request back to a JobConfig. Pure.

A request that we made, and that nobody changed, holds its spec. From any other, whatever a training job has comes back;
sections that SageMaker does not read (`kubernetes`, `slurm`, `scheduling`) do not, and labels come back as tags.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog.labels import JOB as TAG
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import Overlay, SageMakerOverlay
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig, take_variable
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem
from hyperpod_ext.submit.contract.spec_annotation import parse_note
from hyperpod_ext.submit.sagemaker.container import ENTRY, ENV_SECRET_ID, ENV_SPEC
from hyperpod_ext.submit.sagemaker.overlay import problems
from hyperpod_ext.submit.sagemaker.request import (
    CODE_CHANNEL,
    DEFAULT_RUN_S,
    code_uri,
    plain_request,
    training_job_request,
)
from hyperpod_ext.submit.sagemaker.strict import check_request

_TIME = re.compile(r"-\d{8}-\d{6}$")
_INSTALL = re.compile(r"^python3 -m pip install -q (?P<wanted>.+) && exec ")
_DISK_GIB = 30

Document = dict[str, Any]


def import_request(request: Mapping[str, Any], source: str) -> tuple[JobConfig, list[str]]:
    """The job, and the members of the request that a JobConfig cannot say.

    Raises:
        ConfigError: what it says is no valid job; names every field.
    """
    try:
        return _imported(request, source)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ConfigError(_wrong_form(request, source, error)) from None


def _wrong_form(request: Mapping[str, Any], source: str, error: Exception) -> list[Problem]:
    """What of the request is not of the form that SageMaker takes."""
    try:
        found = [replace(one, source=source) for one in check_request("CreateTrainingJob", request)]
    except HyperpodExtError:
        found = []  # without botocore's model
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return found or [Problem(f"is no request that can be read: {why[:200]}", source=source)]


def _imported(request: Mapping[str, Any], source: str) -> tuple[JobConfig, list[str]]:
    rest = copy.deepcopy(dict(request))
    note = take_variable(rest.get("Environment", {}), ENV_SPEC)
    recorded = parse_note(note) if note is not None else None
    if recorded is not None and training_job_request(recorded, str(request["TrainingJobName"])) == request:
        return recorded, []
    options: Document = {}
    document: Document = {"name": _TIME.sub("", str(rest.pop("TrainingJobName"))).lower(), "sagemaker": options}
    document |= _environment(rest, options)
    document |= _container(rest, options, str(request["TrainingJobName"]))
    document |= _resources(rest, options)
    _network_and_more(rest, options)
    stopping = rest.get("StoppingCondition", {})
    run_s = stopping.pop("MaxRuntimeInSeconds", DEFAULT_RUN_S)
    if run_s != DEFAULT_RUN_S:
        document["timeouts"] = {"run_s": run_s}
    wait_s = stopping.pop("MaxWaitTimeInSeconds", None)
    _put(options, "max_wait_s", None if wait_s == run_s else wait_s)
    _put(options, "max_pending_s", stopping.pop("MaxPendingTimeInSeconds", None))
    if retries := rest.get("RetryStrategy", {}).pop("MaximumRetryAttempts", None):
        document["relaunch"] = {"max_times": retries}
    try:
        job = JobConfig.model_validate_json(json.dumps(document))
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None
    job = _carried(job, rest)
    changed = [] if note is None else [f"Environment.{ENV_SPEC}: the request was changed after it was written"]
    return job, [*changed, *sorted(_left(rest, ""))]


def _carried(job: JobConfig, rest: Document) -> JobConfig:
    """`job` with an overlay of the members that are left, which are then taken out of `rest`; those that an overlay may
    not say stay there."""
    for name in sorted(rest):
        if not (members := _without_empty(rest[name])) and members not in (0, False):
            continue
        added = {**job.overlay.sagemaker.request, name: members}
        overlay = Overlay(sagemaker=SageMakerOverlay(request=added))
        changed = job.model_copy(update={"overlay": overlay})
        try:
            refused = list(problems(plain_request(changed), added))
        except HyperpodExtError:
            return job  # without botocore's model nothing is certain
        if not refused:
            job = changed
            del rest[name]
    return job


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    found = {name: _without_empty(below) for name, below in value.items()}
    return {name: below for name, below in found.items() if below != {}}


def _environment(rest: Document, options: Document) -> Document:
    """Variables of the workers, and the settings of our runtime among them."""
    env = rest.pop("Environment", {})
    settings = take_variable(env, ENV_RUNTIME)
    secret = env.pop(ENV_SECRET_ID, None)
    found: Document = {"env": env} if env else {}
    if settings is None:
        return found | {"mode": "plain"}
    runtime = RuntimeConfig.model_validate_json(settings)
    if secret not in (None, f"hyperpod_ext/{runtime.name}"):
        options["secret"] = secret
    shared = set(RuntimeConfig.model_fields) & set(JobConfig.model_fields) - {"mode"}
    return found | {name: value for name, value in runtime.model_dump(mode="json").items() if name in shared}


def _container(rest: Document, options: Document, job_name: str) -> Document:
    algorithm, values = rest.get("AlgorithmSpecification", {}), rest.pop("HyperParameters", {})
    found: Document = {}
    _put(found, "image", algorithm.pop("TrainingImage", None))
    algorithm.pop("TrainingInputMode", None)
    metrics = algorithm.pop("MetricDefinitions", [])
    _put(options, "metrics", [{"name": one["Name"], "regex": one["Regex"]} for one in metrics] or None)
    decoded = {name: _decoded(value) for name, value in values.items()}
    found["script"] = decoded.pop("sagemaker_program", None)
    _put(options, "region", decoded.pop("sagemaker_region", None))
    where = decoded.pop("sagemaker_submit_directory", None)
    output = rest.get("OutputDataConfig", {}).get("S3OutputPath", "")
    for channel in rest.get("InputDataConfig", []):
        if channel["ChannelName"] == CODE_CHANNEL:  # of an isolated job
            where = channel["DataSource"]["S3DataSource"]["S3Uri"]
    if str(where).startswith("s3://") and where != code_uri(output, job_name):
        options["code"] = where
    start = algorithm.pop("ContainerEntrypoint", [])
    if match := next((one for text in start if (one := _INSTALL.match(text))), None):
        options["install"] = [word.strip("'") for word in match["wanted"].split()]
    elif start and start != list(ENTRY):
        algorithm["ContainerEntrypoint"] = start
    arguments = algorithm.pop("ContainerArguments", None)
    ours = {name: value for name, value in decoded.items() if not name.startswith("sagemaker_")}
    pairs = [text for name, value in ours.items() for text in (f"--{name}", str(value))]
    _put(found, "args", arguments or pairs or None)
    if found["script"] is None:  # an image that is its own program
        del found["script"]
    return found


def _resources(rest: Document, options: Document) -> Document:
    given = rest.get("ResourceConfig", {})
    found: Document = {}
    if groups := given.pop("InstanceGroups", None):
        found["node_groups"] = [
            {"name": one["InstanceGroupName"], "nodes": one["InstanceCount"], "instance_type": one["InstanceType"]}
            for one in groups
        ]
        found["nodes"] = sum(one["InstanceCount"] for one in groups)
    else:
        found["nodes"] = given.pop("InstanceCount", 1)
        found["resources"] = {"instance_type": given.pop("InstanceType", None)}
    disk = given.pop("VolumeSizeInGB", _DISK_GIB)
    _put(options, "volume_gib", None if disk == _DISK_GIB else disk)
    _put(options, "volume_kms_key", given.pop("VolumeKmsKeyId", None))
    _put(options, "keep_alive_s", given.pop("KeepAlivePeriodInSeconds", None))
    _put(options, "training_plan", given.pop("TrainingPlanArn", None))
    return found


def _network_and_more(rest: Document, options: Document) -> None:
    output = rest.get("OutputDataConfig", {})
    _put(options, "role", rest.pop("RoleArn", None))
    _put(options, "output", output.pop("S3OutputPath", None))
    _put(options, "output_kms_key", output.pop("KmsKeyId", None))
    _put(options, "compress_output", False if output.pop("CompressionType", "GZIP") == "NONE" else None)
    if network := rest.pop("VpcConfig", None):
        options["vpc"] = {"subnets": network["Subnets"], "security_groups": network["SecurityGroupIds"]}
    for member, name in (
        ("EnableNetworkIsolation", "network_isolation"),
        ("EnableInterContainerTrafficEncryption", "encrypt_traffic"),
        ("EnableManagedSpotTraining", "spot"),
    ):
        _put(options, name, rest.pop(member, None) or None)
    for member, inner, name in (
        ("RemoteDebugConfig", "EnableRemoteDebug", "remote_debug"),
        ("InfraCheckConfig", "EnableInfraCheck", "infra_check"),
    ):
        _put(options, name, rest.get(member, {}).pop(inner, None) or None)
    profiler = rest.pop("ProfilerConfig", {"DisableProfiler": True})
    _put(options, "profiler", None if profiler.get("DisableProfiler") else True)
    if kept := rest.pop("CheckpointConfig", None):
        options |= {"checkpoint_uri": kept["S3Uri"]}
        _put(options, "checkpoint_path", kept.get("LocalPath"))
    if filed := rest.pop("ExperimentConfig", None):
        options["experiment"] = {"name": filed.get("ExperimentName")}
        _put(options["experiment"], "trial", filed.get("TrialName"))
        _put(options["experiment"], "run", filed.get("RunName"))
    _put(options, "tags", {tag["Key"]: tag["Value"] for tag in rest.pop("Tags", []) if tag["Key"] != TAG} or None)
    channels = {one["ChannelName"]: _channel(one) for one in rest.pop("InputDataConfig", [])}
    channels.pop(CODE_CHANNEL, None)
    _put(options, "channels", channels or None)


def _channel(given: Mapping[str, Any]) -> Document:
    source = given["DataSource"]
    if files := source.get("FileSystemDataSource"):
        return {
            "kind": "file-system",
            "id": files["FileSystemId"],
            "type": files["FileSystemType"],
            "directory": files["DirectoryPath"],
            "access": files["FileSystemAccessMode"],
        }
    s3 = source["S3DataSource"]
    found: Document = {
        "kind": "s3",
        "uri": s3["S3Uri"],
        "data": s3["S3DataType"],
        "mode": given.get("InputMode", "File"),
    }
    _put(found, "distribution", s3.get("S3DataDistributionType"))
    _put(found, "content_type", given.get("ContentType"))
    _put(found, "compression", given.get("CompressionType"))
    return found


def _decoded(value: str) -> Any:
    """Values are JSON where one of SageMaker's SDKs wrote them, and bare where a person did."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _put(document: Document, name: str, value: Any) -> None:
    if value is not None:
        document[name] = value


def _left(rest: Any, path: str) -> list[str]:
    if isinstance(rest, dict):
        return [one for name, value in rest.items() for one in _left(value, f"{path}.{name}" if path else name)]
    return [path]
