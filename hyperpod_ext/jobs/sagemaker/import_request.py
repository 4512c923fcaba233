"""Import of a CreateTrainingJob request as a JobConfig. Pure.

A request that hp-ext rendered contains the spec, which is returned if nobody has edited the request. From any other
request, all fields of a training job are imported. In an edited request, the spec's labels have become tags, and
sections that SageMaker ignores (`kubernetes`, `slurm`, `scheduling`) are lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.catalog.labels import JOB as TAG
from hyperpod_ext.config.files.document import Document, parse
from hyperpod_ext.config.files.error_messages import problems_of
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import Overlay, SageMakerOverlay
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig, take_variable
from hyperpod_ext.config.job.secret_variables import with_secrets
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem
from hyperpod_ext.jobs.contract.spec_annotation import parse_note
from hyperpod_ext.jobs.imports.report import Fields, Imported, Report
from hyperpod_ext.jobs.sagemaker.container import ENTRY, ENV_SECRET_ID, ENV_SPEC
from hyperpod_ext.jobs.sagemaker.overlay import problems, with_overlay
from hyperpod_ext.jobs.sagemaker.request import CODE_CHANNEL, code_uri, plain_request, training_job_request
from hyperpod_ext.jobs.sagemaker.strict import check_request

_TARGET = "sagemaker"
_TIME = re.compile(r"-\d{8}-\d{6}$")
_INSTALL = re.compile(r"^python3 -m pip install -q (?P<wanted>.+) && exec ")
_TORCHRUN = "sagemaker_torch_distributed_enabled"
_LAUNCHERS = {
    "sagemaker_mpi_enabled": "MPI",
    "sagemaker_distributed_dataparallel_enabled": "SageMaker's data parallel library (smddp)",
    "sagemaker_pytorch_ddp_enabled": "SageMaker's pytorchddp",
    "sagemaker_pytorch_xla_multi_worker_enabled": "PyTorch/XLA",
    "sagemaker_parameter_server_enabled": "parameter servers",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "a strategy of TensorFlow",
}
"""Hyperparameters with which SageMaker's images start the processes with another launcher than torchrun."""
_RENDERED = {"sagemaker_container_log_level", "sagemaker_job_name", "sagemaker_instance_type"}
"""Hyperparameters that are not imported, because hp-ext sets them itself in a rendered request."""

Object = dict[str, Any]


def import_request(text: str, source: str) -> Imported:
    """Return the job, and a sentence for each member of the request that a JobConfig cannot express.

    Args:
        text: the request as JSON.
        source: name of the file for messages.

    Raises:
        ConfigError: another launcher than torchrun starts the processes, or the job is invalid. The error names every
            invalid field.
    """
    request = json.loads(text)
    # parse as YAML, without tabs, only to get line numbers
    places = parse(re.sub(r'"(?:[^"\\]|\\.)*"|\t', lambda found: found[0].replace("\t", " "), text), source)
    try:
        return _imported(request, places)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ConfigError(_wrong_form(request, source, error)) from None


def _wrong_form(request: Mapping[str, Any], source: str, error: Exception) -> list[Problem]:
    """Return a problem for each part of an unreadable request that SageMaker would refuse.

    Args:
        error: error of the import, reported if SageMaker's model finds no problem.
    """
    try:
        found = [replace(one, source=source) for one in check_request("CreateTrainingJob", request)]
    except HyperpodExtError:
        found = []  # botocore, which has SageMaker's model, is not installed
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return found or [Problem(f"is not a readable request: {why[:200]}", source=source)]


def _imported(request: Mapping[str, Any], places: Document) -> Imported:
    note = take_variable(dict(request.get("Environment", {})), ENV_SPEC)
    recorded = parse_note(note) if note is not None else None
    if recorded is not None:
        recorded = with_secrets(recorded, request.get("Environment", {}))
    if recorded is not None and training_job_request(recorded, str(request["TrainingJobName"])) == request:
        return Imported(recorded, _TARGET)
    report = Report(places.source)
    report.left_out += [str(one) for one in places.problems if "twice" in one.message]
    given = Fields(request, places)
    if note is not None:
        report.left_out.append(
            given.below("Environment").says(ENV_SPEC, "the request was edited after hp-ext wrote it")
        )
    name = str(given.take("TrainingJobName"))
    options: Object = {}
    document: Object = {"name": _TIME.sub("", name).lower(), "sagemaker": options}
    document |= _environment(given, options)
    document |= _resources(given, options)
    document |= _container(given, options, document, report)
    _network_and_more(given, options, report)
    overlaid = _channels(given, options, report)
    stopping = given.below("StoppingCondition")
    for holder, member, into, field in (
        (stopping, "MaxRuntimeInSeconds", "timeouts", "run_s"),
        (given.below("RetryStrategy"), "MaximumRetryAttempts", "relaunch", "max_times"),
    ):
        if (value := holder.take(member)) is not None:
            document[into] = {field: value}
    _put(options, "max_wait_s", stopping.take("MaxWaitTimeInSeconds"))
    _put(options, "max_pending_s", stopping.take("MaxPendingTimeInSeconds"))
    try:
        job = JobConfig.model_validate_json(json.dumps(document))
    except ValidationError as error:
        member = "HyperParameters.sagemaker_program"  # import takes `script` from this member of the request
        hint = "set it to the name of the Python file, such as train.py"
        no_script = Problem("is missing, so the job's script is unknown", member, places.source, hint=hint)
        found = problems_of(error, JobConfig, places.source, document)
        is_open = "script" not in document
        raise ConfigError([no_script if is_open and one.path == "script" else one for one in found]) from None
    job = _carried(job, overlaid, given, report)
    return Imported(job, _TARGET, [*report.left_out, *map(str, given.problems())], report.notes)


def _carried(job: JobConfig, channels: list[Object], given: Fields, report: Report) -> JobConfig:
    """Return `job` with an overlay that adds channels and members of the request which a spec cannot express.

    Args:
        channels: channels with members that a spec lacks.
        given: the request. The overlay gets all members of the request that were not read, if an overlay accepts them.
    """
    if channels:
        changed = _with_overlay(job, {"InputDataConfig": channels})
        if changed is None:
            names = ", ".join(str(one["ChannelName"]) for one in channels)
            report.lost(
                f"InputDataConfig: channels {names} have members that an overlay does not accept, and are left out"
            )
        job = changed or job
    for name, value in given.rest().items():
        if (changed := _with_overlay(job, {name: value})) is not None:
            job = changed
            given.take(name)
        elif isinstance(value, dict):
            for member, below in value.items():
                if (changed := _with_overlay(job, {name: {member: below}})) is not None:
                    job = changed
                    given.below(name).take(member)
    return job


def _with_overlay(job: JobConfig, members: Object) -> JobConfig | None:
    """Return `job` with `members` of the request in its overlay; None if an overlay does not accept a member."""
    added = with_overlay(job.overlay.sagemaker.request, members)
    changed = job.model_copy(update={"overlay": Overlay(sagemaker=SageMakerOverlay(request=added))})
    try:
        return None if any(True for _problem in problems(plain_request(changed), added)) else changed
    except (HyperpodExtError, ValueError):
        return None  # the overlay cannot be checked: botocore is missing, or arguments are invalid


def _environment(given: Fields, options: Object) -> Object:
    """Import the environment variables of the request. The settings in the variable of this project's runtime become
    fields of the spec."""
    env = dict(given.take("Environment") or {})
    take_variable(env, ENV_SPEC)
    settings, secret = take_variable(env, ENV_RUNTIME), env.pop(ENV_SECRET_ID, None)
    found: Object = {"env": env} if env else {}
    if settings is None:
        return found | {"mode": "plain"}
    runtime = RuntimeConfig.model_validate_json(settings)
    if secret not in (None, f"hyperpod_ext/{runtime.name}"):
        options["secret"] = secret
    shared = set(RuntimeConfig.model_fields) & set(JobConfig.model_fields) - {"mode"}
    return found | {name: value for name, value in runtime.model_dump(mode="json").items() if name in shared}


def _container(given: Fields, options: Object, document: Object, report: Report) -> Object:
    algorithm, values = given.below("AlgorithmSpecification"), given.below("HyperParameters")
    is_ours = document.get("mode") != "plain"
    found: Object = {}
    _put(found, "image", algorithm.take("TrainingImage"))
    metrics = algorithm.take("MetricDefinitions")
    _put(options, "metrics", metrics and [{"name": one["Name"], "regex": one["Regex"]} for one in metrics])
    _put(found, "script", _decoded(values.take("sagemaker_program")))
    _put(options, "region", _decoded(values.take("sagemaker_region")))
    where = str(_decoded(values.take("sagemaker_submit_directory")))
    for channel in given.each("InputDataConfig"):
        if channel.take("ChannelName") == CODE_CHANNEL:  # for a job without network access, the code is a channel
            where = channel.take("DataSource")["S3DataSource"]["S3Uri"]
    output = str(given.below("OutputDataConfig").take("S3OutputPath", ""))
    if where.startswith("s3://"):
        if where == code_uri(output, str(given.take("TrainingJobName"))):
            report.notes.append(values.says("sagemaker_submit_directory", "hp-ext uploads the code to this place"))
        else:
            options["code"] = where
    if not is_ours and found.get("script"):
        found |= _launcher(values, document, report)
    start = algorithm.get("ContainerEntrypoint") or []
    if match := next((one for text in start if (one := _INSTALL.match(text))), None):
        options["install"] = [word.strip("'") for word in match["wanted"].split()]
    if match or start == list(ENTRY):
        algorithm.take("ContainerEntrypoint")
        _put(found, "args", algorithm.take("ContainerArguments"))
    elif not is_ours:
        pairs = {name: values.take(name) for name in values.names() if not name.startswith("sagemaker_")}
        words = [text for name, value in pairs.items() for text in (f"--{name}", str(_decoded(value)))]
        _put(found, "args", words or None)
    return found


def _launcher(values: Fields, document: Object, report: Report) -> Object:
    """Return the number of workers per node, and report how the image starts the workers.

    Raises:
        ConfigError: the image starts the workers with another launcher than torchrun, which a spec cannot express.
    """
    for name, what in _LAUNCHERS.items():
        if _decoded(values.take(name, "false")):
            hint = f"use torchrun ({_TORCHRUN}: true) and import again, or send the request unchanged"
            message = (
                f"{what} starts the processes, but a rendered job uses torchrun, which sets other variables of ranks"
            )
            raise ConfigError([replace(values.problem(name, message), hint=hint)])
    machine = instance(str(document["resources"].get("instance_type"))) if "resources" in document else None
    workers = max(machine.accelerators, 1) if machine else 1
    machines = {instance(str(group["instance_type"])) for group in document.get("node_groups", [])}
    if machines and None not in machines:
        workers = max(1, *(one.accelerators for one in machines if one))
    if not _decoded(values.take(_TORCHRUN, "false")):
        one_each = "the request has no distribution, so the image starts one process on each node, without ranks"
        report.lost(f"HyperParameters: {one_each}; the rendered job uses torchrun with {workers} on each node")
    if machine is None and not (machines and None not in machines):
        report.lost("workers_per_node: is 1, because the accelerators of the instance type are unknown")
    else:
        report.note(f"workers_per_node: {workers}, the accelerators of a node, as SageMaker's torchrun starts them")
    typed = _decoded(values.get("sagemaker_instance_type"))
    for name in _RENDERED:
        if name in values.names() and (name != "sagemaker_instance_type" or (machine and typed == machine.name)):
            report.notes.append(values.says(name, f"{values.take(name)}: the rendered request sets its own value"))
    return {"workers_per_node": workers}


def _resources(given: Fields, options: Object) -> Object:
    resources = given.below("ResourceConfig")
    found: Object = {}
    if groups := resources.take("InstanceGroups"):
        found["node_groups"] = [
            {"name": one["InstanceGroupName"], "nodes": one["InstanceCount"], "instance_type": one["InstanceType"]}
            for one in groups
        ]
        found["nodes"] = sum(one["InstanceCount"] for one in groups)
    else:
        _put(found, "nodes", resources.take("InstanceCount"))
        found["resources"] = {"instance_type": resources.take("InstanceType")}
    _put(options, "volume_gib", resources.take("VolumeSizeInGB"))
    _put(options, "volume_kms_key", resources.take("VolumeKmsKeyId"))
    _put(options, "keep_alive_s", resources.take("KeepAlivePeriodInSeconds"))
    _put(options, "training_plan", resources.take("TrainingPlanArn"))
    return found


def _network_and_more(given: Fields, options: Object, report: Report) -> None:
    output = given.below("OutputDataConfig")
    _put(options, "role", given.take("RoleArn"))
    _put(options, "output", output.take("S3OutputPath"))
    _put(options, "output_kms_key", output.take("KmsKeyId"))
    if (compression := output.take("CompressionType")) is not None:
        options["compress_output"] = compression != "NONE"
    network = given.below("VpcConfig")
    if subnets := network.take("Subnets"):
        options["vpc"] = {"subnets": subnets, "security_groups": network.take("SecurityGroupIds")}
    for holder, member, name in (
        (given, "EnableNetworkIsolation", "network_isolation"),
        (given, "EnableInterContainerTrafficEncryption", "encrypt_traffic"),
        (given, "EnableManagedSpotTraining", "spot"),
        (given.below("RemoteDebugConfig"), "EnableRemoteDebug", "remote_debug"),
        (given.below("InfraCheckConfig"), "EnableInfraCheck", "infra_check"),
        (given.below("CheckpointConfig"), "S3Uri", "checkpoint_uri"),
        (given.below("CheckpointConfig"), "LocalPath", "checkpoint_path"),
    ):
        _put(options, name, holder.take(member))
    profiler = given.below("ProfilerConfig")
    if profiler.names():
        options["profiler"] = not profiler.take("DisableProfiler", False)
        where = profiler.get("S3OutputPath")
        if (
            options["profiler"]
            and where is not None
            and str(where).rstrip("/") == str(options.get("output")).rstrip("/")
        ):
            report.notes.append(profiler.says("S3OutputPath", f"{profiler.take('S3OutputPath')}: is rendered again"))
    filed = given.below("ExperimentConfig")
    if (name := filed.take("ExperimentName")) is not None:
        options["experiment"] = {"name": name}
        _put(options["experiment"], "trial", filed.take("TrialName"))
        _put(options["experiment"], "run", filed.take("RunName"))
    tags = {tag["Key"]: tag["Value"] for tag in given.take("Tags") or []}
    if (tagged := tags.pop(TAG, None)) is not None:
        report.note(f"Tags.{TAG}: {tagged}: hp-ext tags the job with its own name")
    _put(options, "tags", tags or None)


def _channels(given: Fields, options: Object, report: Report) -> list[Object]:
    """Put the request's channels into the spec. Return the channels that need an overlay, because they have members
    that a spec lacks."""
    algorithm = given.below("AlgorithmSpecification")
    mode = algorithm.take("TrainingInputMode", "File")
    if "TrainingInputMode" in algorithm.names():
        text = f"{mode}: each channel of a spec has its own mode"
        report.notes.append(algorithm.says("TrainingInputMode", text))
    found: Object = {}
    overlaid = []
    for one in given.each("InputDataConfig"):
        name = one.take("ChannelName")
        if name == CODE_CHANNEL:
            one.take_all()
            continue
        found[name] = _channel(one, mode)
        if list(one.problems()):
            members = one.take_all()
            is_s3 = "S3DataSource" in members["DataSource"]
            overlaid.append(members | ({"InputMode": members.get("InputMode", mode)} if is_s3 else {}))
            del found[name]
    _put(options, "channels", found or None)
    return overlaid


def _channel(given: Fields, mode: str) -> Object:
    source = given.below("DataSource")
    files = source.below("FileSystemDataSource")
    if files.names():
        return {
            "kind": "file-system",
            "id": files.take("FileSystemId"),
            "type": files.take("FileSystemType"),
            "directory": files.take("DirectoryPath"),
            "access": files.take("FileSystemAccessMode"),
        }
    s3 = source.below("S3DataSource")
    found: Object = {
        "kind": "s3",
        "uri": s3.take("S3Uri"),
        "data": s3.take("S3DataType"),
        "mode": given.take("InputMode", mode),
    }
    _put(found, "distribution", s3.take("S3DataDistributionType"))
    _put(found, "content_type", given.take("ContentType"))
    _put(found, "compression", given.take("CompressionType"))
    return found


def _decoded(value: Any) -> Any:
    """Decode the value of a hyperparameter, which is JSON if SageMaker's SDK wrote it, or plain text from a user."""
    try:
        return json.loads(value) if value is not None else None
    except json.JSONDecodeError:
        return value


def _put(document: Object, name: str, value: Any) -> None:
    if value is not None:
        document[name] = value
