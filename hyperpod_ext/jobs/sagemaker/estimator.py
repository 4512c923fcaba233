"""Keyword arguments for classes of the SageMaker Python SDK, made from a JobConfig.

    from sagemaker.pytorch import PyTorch                        # 2.x
    from hyperpod_ext.jobs.sagemaker.estimator import estimator_kwargs, fit_kwargs

    job = load(JobConfig, "job.yaml")
    estimator = PyTorch(entry_point=job.script, source_dir=".", **estimator_kwargs(job))
    estimator.fit(**fit_kwargs(job))

    from sagemaker.train import ModelTrainer                     # 3.x
    from hyperpod_ext.jobs.sagemaker.estimator import model_trainer, model_trainer_kwargs

    trainer = model_trainer(ModelTrainer(**model_trainer_kwargs(job, source_dir=".")), job)
    trainer.train()

`estimator_kwargs` and `model_trainer_kwargs` create the job's secret in Secrets Manager, as `hp-ext create-job` does,
if the job needs a secret that does not exist. With the arguments, the SDK sends the same request that
`hyperpod_ext.jobs.sagemaker.request` renders. A spec with a field that the SDK would ignore silently is refused.
"""

from __future__ import annotations

import importlib
import re
import shlex
import warnings
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import HyperpodExtError, Problem, UnreachableError, UnsupportedError
from hyperpod_ext.jobs.sagemaker.container import ENTRY, arguments_of, entrypoint_of, environment_of, secret_id
from hyperpod_ext.jobs.sagemaker.problems import problems
from hyperpod_ext.jobs.sagemaker.request import (
    CODE_CHANNEL,
    DEFAULT_RUN_S,
    Request,
    experiment,
    given,
    tags,
    training_job_request,
)
from hyperpod_ext.jobs.sagemaker.secret import ensure_secret, how_to_create

Kwargs = dict[str, Any]


def distribution(job: JobConfig) -> Kwargs:
    """Return the value of `distribution=` for a `PyTorch` of sagemaker 2.x whose other arguments you set yourself.

    With the returned value, SageMaker starts the script with torchrun. The value sets no other part of the job: pass
    role, image, instances, environment and arguments yourself. `estimator_kwargs` returns `distribution` and all other
    arguments.

    Raises:
        UnsupportedError: SageMaker cannot run this job, or `distribution=` alone does not start it.
    """
    _check(job, _problems_alone(job))
    return _torchrun()


def distributed(job: JobConfig) -> Any:
    """Return the value of `distributed=` for a `ModelTrainer` of sagemaker 3.x whose other arguments you set yourself.

    With the returned value, SageMaker starts the script with torchrun.

    Raises:
        UnsupportedError: SageMaker cannot run this job, or `distributed=` alone does not start it.
        HyperpodExtError: sagemaker 3.x is not installed.
    """
    _check(job, _problems_alone(job))
    return _trainer_torchrun(job)


def estimator_kwargs(job: JobConfig, boto_session: Any = None) -> Kwargs:
    """Return the arguments of sagemaker 2.x's `PyTorch`, except `entry_point` and `source_dir`.

    Also creates the job's secret, if the job needs a secret that does not exist.

    Args:
        boto_session: a `boto3.Session`, with which the secret is created; None uses the identity and region of this
            environment.

    Raises:
        UnsupportedError: SageMaker or its SDK cannot run this job. The error names every reason.
        HyperpodExtError: sagemaker 2.x is not installed, although groups of nodes need it; the job's secret is about to
            be deleted; or `sagemaker.secret` names a secret that does not exist.
    """
    _check(job, _estimator_problems(job))
    _secret(job, boto_session)
    options, starting = job.sagemaker, entrypoint_of(job)
    started: Kwargs | None = _torchrun() if job.mode == "plain" else None
    groups: Kwargs = {"instance_count": job.nodes, "instance_type": job.resources.instance_type}
    if job.node_groups:
        made = _instance_groups(job)
        groups = {"instance_groups": made}
        if started and len(made) > 1:
            # The SDK accepts exactly one group in `distribution`, which must be the same object as in
            # `instance_groups`. SageMaker's image runs torchrun only on the nodes of the group in `distribution`.
            started["instance_groups"] = made[:1]
    return groups | given(
        distribution=started,
        role=options.role,
        image_uri=job.image,
        base_job_name=job.name,
        output_path=options.output,
        code_location=options.output and options.output.rstrip("/"),
        output_kms_key=options.output_kms_key,
        disable_output_compression=not options.compress_output,
        volume_size=options.volume_gib or 30,
        volume_kms_key=options.volume_kms_key,
        keep_alive_period_in_seconds=options.keep_alive_s,
        training_plan=options.training_plan,
        max_run=job.timeouts.run_s or DEFAULT_RUN_S,
        use_spot_instances=options.spot or None,
        max_wait=training_job_request(job)["StoppingCondition"].get("MaxWaitTimeInSeconds"),
        max_retry_attempts=job.relaunch.max_times or None,
        checkpoint_s3_uri=options.checkpoint_uri,
        checkpoint_local_path=options.checkpoint_path if options.checkpoint_uri else None,
        subnets=list(options.vpc.subnets) if options.vpc else None,
        security_group_ids=list(options.vpc.security_groups) if options.vpc else None,
        enable_network_isolation=options.network_isolation or None,
        encrypt_inter_container_traffic=options.encrypt_traffic or None,
        metric_definitions=[{"Name": m.name, "Regex": m.regex} for m in options.metrics] or None,
        environment=environment_of(job) or None,
        hyperparameters=arguments_of(job) if job.mode == "plain" else None,
        container_entry_point=starting.get("ContainerEntrypoint"),
        container_arguments=starting.get("ContainerArguments"),
        tags=tags(job) or None,
        disable_profiler=not options.profiler,
        debugger_hook_config=False,
        enable_remote_debug=options.remote_debug or None,
        enable_infra_check=options.infra_check or None,
    )


def fit_kwargs(job: JobConfig) -> Kwargs:
    """Return the arguments of the method `PyTorch.fit`: settings of the job that `PyTorch` itself does not accept."""
    _check(job)
    inputs: Any = _module("sagemaker.inputs", "sagemaker<3") if job.sagemaker.channels else None
    found = {}
    for name, channel in job.sagemaker.channels.items():
        if channel.kind == "file-system":
            found[name] = inputs.FileSystemInput(
                channel.id, channel.type, channel.directory, file_system_access_mode=channel.access
            )
        else:
            found[name] = inputs.TrainingInput(
                channel.uri,
                distribution=channel.distribution,
                compression=channel.compression,
                content_type=channel.content_type,
                input_mode=channel.mode,
                s3_data_type=channel.data,
            )
    return given(inputs=found or None, experiment_config=experiment(job))


def model_trainer_kwargs(job: JobConfig, source_dir: str = ".", boto_session: Any = None) -> Kwargs:
    """Return the arguments of sagemaker 3.x's `ModelTrainer`, whose other settings are set by `model_trainer`.

    Also creates the job's secret, if the job needs a secret that does not exist.

    Args:
        source_dir: folder of the script, or an S3 URI of this folder.
        boto_session: a `boto3.Session`, with which the secret is created; None uses the identity and region of this
            environment.

    Raises:
        UnsupportedError: SageMaker or its SDK cannot run this job. The error names every reason.
        HyperpodExtError: sagemaker 3.x is not installed, although jobs under torchrun need it; the job's secret is
            about to be deleted; or `sagemaker.secret` names a secret that does not exist.
    """
    _check(job, model_trainer_problems(job))
    _secret(job, boto_session)
    options, request = job.sagemaker, training_job_request(job)
    plain = job.mode == "plain"
    return given(
        role=options.role,
        base_job_name=job.name,
        training_image=job.image,
        source_code=given(
            source_dir=source_dir,
            command=None if plain else trainer_command(job),
            entry_script=job.script if plain else None,
            args=None if plain else list(job.args) or None,
        ),
        distributed=_trainer_torchrun(job) if plain else None,
        compute=_snake(request["ResourceConfig"])
        | given(
            enable_managed_spot_training=options.spot or None,
        ),
        stopping_condition=_snake(request["StoppingCondition"]),
        output_data_config=_snake(request["OutputDataConfig"]),
        input_data_config=[
            _snake(one) for one in request.get("InputDataConfig", []) if one["ChannelName"] != CODE_CHANNEL
        ]
        or None,
        checkpoint_config=_snake(request["CheckpointConfig"]) if "CheckpointConfig" in request else None,
        networking=given(
            subnets=list(options.vpc.subnets) if options.vpc else None,
            security_group_ids=list(options.vpc.security_groups) if options.vpc else None,
            enable_network_isolation=options.network_isolation or None,
            enable_inter_container_traffic_encryption=options.encrypt_traffic or None,
        )
        or None,
        environment=environment_of(job),
        hyperparameters=arguments_of(job) if plain and job.args else None,
        tags=[_snake(tag) for tag in tags(job)] or None,
    )


def model_trainer(trainer: Any, job: JobConfig) -> Any:
    """Set the settings of a ModelTrainer that its constructor does not accept; return the ModelTrainer."""
    shapes = _module("sagemaker.core.shapes", "sagemaker>=3")
    options = job.sagemaker
    if job.relaunch.max_times:
        trainer.with_retry_strategy(shapes.RetryStrategy(maximum_retry_attempts=job.relaunch.max_times))
    if options.metrics:
        trainer.with_metric_definitions([shapes.MetricDefinition(name=m.name, regex=m.regex) for m in options.metrics])
    if options.remote_debug:
        trainer.with_remote_debug_config(shapes.RemoteDebugConfig(enable_remote_debug=True))
    if options.infra_check:
        trainer.with_infra_check_config(shapes.InfraCheckConfig(enable_infra_check=True))
    return trainer


def trainer_command(job: JobConfig) -> str:
    """Return the command that ModelTrainer runs on every node, in the folder of the script."""
    install = shlex.join(["python3", "-m", "pip", "install", "-q", *job.sagemaker.install])
    start = f"HPX_SCRIPT={shlex.quote(job.script)} {shlex.join(ENTRY)}"
    return f"{install} && {start}" if job.sagemaker.install else start


def model_trainer_problems(job: JobConfig) -> list[Problem]:
    """Return a problem for each field of the spec that ModelTrainer would ignore silently."""
    found = _code_problems(job, "ModelTrainer")
    if job.sagemaker.experiment is not None:
        hint = "remove this field, or use hp-ext, or version 2 of the package sagemaker"
        found.append(Problem("ModelTrainer does not support experiments", path="sagemaker.experiment", hint=hint))
    if job.sagemaker.profiler:
        hint = "remove this field, or use hp-ext, or version 2 of the package sagemaker"
        found.append(Problem("ModelTrainer does not profile", path="sagemaker.profiler", hint=hint))
    if any(character.isspace() for character in job.script):
        hint = "rename the script"
        found.append(
            Problem(
                "ModelTrainer splits commands at blanks, so the script's name must not have any",
                path="script",
                hint=hint,
            )
        )
    return found


def _torchrun() -> Kwargs:
    return {"torch_distributed": {"enabled": True}}


def _trainer_torchrun(job: JobConfig) -> Any:
    torchrun = _module("sagemaker.train.distributed", "sagemaker>=3").Torchrun
    return torchrun(process_count_per_node=job.workers_per_node)


def _estimator_problems(job: JobConfig) -> list[Problem]:
    """Return a problem for each field of the spec that `PyTorch` would ignore silently."""
    found = _code_problems(job, "PyTorch")
    if job.sagemaker.max_pending_s is not None:
        hint = "remove this field, or use sagemaker 3.x or hp-ext"
        found.append(Problem("PyTorch cannot limit the wait for nodes", path="sagemaker.max_pending_s", hint=hint))
    return found


def _problems_alone(job: JobConfig) -> list[Problem]:
    """Return a problem for each part that the job needs to start and that `distribution=` cannot express."""
    hint = "pass **estimator_kwargs(job) to PyTorch, or **model_trainer_kwargs(job) to ModelTrainer, instead"
    if job.mode != "plain":
        message = "the argument `distribution` alone starts no agent, and passes no settings of the job"
        return [Problem(message, path="mode", hint=f"{hint}; or write mode: plain, which torchrun starts")]
    if job.node_groups:
        return [Problem("distribution= alone cannot express groups of nodes", path="node_groups", hint=hint)]
    return []


def _code_problems(job: JobConfig, who: str) -> list[Problem]:
    if job.sagemaker.code is None:
        return []
    hint = "remove this field, and pass source_dir instead"
    return [Problem(f"{who} uploads the code itself, and would ignore this field", path="sagemaker.code", hint=hint)]


def _overlay_problems(job: JobConfig) -> list[Problem]:
    if not job.overlay.sagemaker.request:
        return []
    hint = "remove it, and pass the SDK's own arguments; or submit with `hp-ext create-job --target sagemaker`"
    return [
        Problem(
            "the SDK builds the request itself, and accepts no additional members", path="overlay.sagemaker", hint=hint
        )
    ]


def _check(job: JobConfig, more: list[Problem] | None = None) -> None:
    if found := [*problems(job), *(more or []), *_overlay_problems(job)]:
        raise UnsupportedError(found)


def _secret(job: JobConfig, boto_session: Any) -> None:
    """Create the job's secret. If Secrets Manager cannot be reached, only warn, so that the SDK can be used offline."""
    try:
        ensure_secret(job, boto_session)
    except UnreachableError as error:
        message = (
            f"the job reads secret {secret_id(job)} when it starts, but the secret could not be checked "
            f"({error.message})"
        )
        warnings.warn(f"{message}; if it does not exist, create it first: {how_to_create(job)}", stacklevel=3)


def _instance_groups(job: JobConfig) -> list[Any]:
    group = _module("sagemaker.instance_group", "sagemaker<3").InstanceGroup
    return [group(one.name, one.instance_type or job.resources.instance_type, one.nodes) for one in job.node_groups]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise HyperpodExtError(f"{package} is not installed", hint=f"pip install '{package}'") from None


def _snake(members: Request) -> Kwargs:
    """Rename members of SageMaker's API to the names of sagemaker 3.x, such as `InstanceType` to `instance_type`."""
    return {
        _snake_name(name): _snake(value)
        if isinstance(value, dict)
        else [_snake(one) if isinstance(one, dict) else one for one in value]
        if isinstance(value, list)
        else value
        for name, value in members.items()
    }


def _snake_name(name: str) -> str:
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name).lower()
