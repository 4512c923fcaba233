"""Problems and warnings of a spec that is submitted as a SageMaker training job. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.sagemaker import overlay
from hyperpod_ext.jobs.sagemaker.container import (
    LONGEST_ARGUMENT,
    LONGEST_VARIABLE,
    MOST_VARIABLES,
    arguments_of,
    entrypoint_of,
    environment_of,
)
from hyperpod_ext.jobs.sagemaker.request import plain_request

_MOST_RETRIES = 30
_MOST_GROUPS = 5
_LONGEST_RUN_S = 28 * 86400


def problems(job: JobConfig) -> Iterator[Problem]:
    """Yield every reason why `job` cannot run as a SageMaker training job."""
    missing = list(_missing(job))
    yield from missing
    yield from _limits(job)
    yield from _combinations(job)
    yield from _arguments(job)
    if job.overlay.sagemaker.request and not missing:
        yield from overlay.problems(plain_request(job), job.overlay.sagemaker.request)


def warnings(job: JobConfig) -> Iterator[str]:
    """Yield warnings about limits of SageMaker that may surprise the user."""
    if job.has_agent and job.nodes > 1:
        again = f"the whole job again, up to {job.relaunch.max_times} times" if job.relaunch.max_times else "nothing"
        yield (
            "SageMaker does not replace a single node of a running job: the runtime recovers processes, and after the "
            f"loss of a node the platform starts {again} (relaunch.max_times)"
        )
    if job.sagemaker.spot and not job.checkpoint.durable() and not job.sagemaker.checkpoint_uri:
        yield "spot without a durable tier: after its nodes are taken away, the job restarts from step 0"
    if job.overlay.sagemaker.request:
        yield f"from overlay.sagemaker: {', '.join(overlay.paths(job.overlay.sagemaker.request))}"
    if job.volumes:
        yield "volumes are ignored: a training job has channels below /opt/ml/input/data"
    if job.shared_memory_mib is not None:
        yield "shared_memory_mib is only checked: SageMaker sets the size of /dev/shm"


def _missing(job: JobConfig) -> Iterator[Problem]:
    for path, value, hint in (
        ("image", job.image, "write the name of a training image, as for docker pull"),
        ("sagemaker.role", job.sagemaker.role, "write the ARN of the job's role"),
        ("sagemaker.output", job.sagemaker.output, "write an S3 prefix, s3://bucket/prefix"),
    ):
        if not value:
            yield Problem("is required on target sagemaker", path=path, hint=hint)
    grouped = job.node_groups and all(group.instance_type for group in job.node_groups)
    if not job.resources.instance_type and not grouped:
        yield Problem(
            "is required on target sagemaker",
            path="resources.instance_type",
            hint="`hp-ext instances` lists instance types",
        )


def _limits(job: JobConfig) -> Iterator[Problem]:
    if (job.relaunch.max_times or 0) > _MOST_RETRIES:
        hint = f"write at most {_MOST_RETRIES}"
        yield Problem(
            f"SageMaker restarts a job only up to {_MOST_RETRIES} times", path="relaunch.max_times", hint=hint
        )
    if (job.timeouts.run_s or 0) > _LONGEST_RUN_S:
        yield Problem(
            "SageMaker runs a job for 28 days at most", path="timeouts.run_s", hint=f"write at most {_LONGEST_RUN_S}"
        )
    if len(job.node_groups) > _MOST_GROUPS:
        yield Problem(
            f"SageMaker supports at most {_MOST_GROUPS} groups of nodes", path="node_groups", hint="merge groups"
        )
    for name, value in job.env.items():
        if len(value) > LONGEST_VARIABLE or len(name) > LONGEST_VARIABLE:
            hint = "put the value in a file next to the script"
            yield Problem(
                f"a variable on SageMaker has at most {LONGEST_VARIABLE} characters", path=f"env.{name}", hint=hint
            )
    if (number := len(environment_of(job))) > MOST_VARIABLES:
        message = f"the job has {number} variables, including those of hp-ext, but SageMaker allows {MOST_VARIABLES}"
        yield Problem(message, path="env", hint=f"remove at least {number - MOST_VARIABLES}")
    if len({**job.labels, **job.sagemaker.tags}) > 49:
        yield Problem(
            "labels and tags exceed the 49 tags that a job can have",
            path="sagemaker.tags",
            hint="use fewer",
        )


def _combinations(job: JobConfig) -> Iterator[Problem]:
    options = job.sagemaker
    if options.spot and options.keep_alive_s:
        hint = "remove keep_alive_s or spot"
        yield Problem("spot nodes are not kept for the next job", path="sagemaker.keep_alive_s", hint=hint)
    if options.max_wait_s is not None and not options.spot:
        yield Problem("has no effect without spot", path="sagemaker.max_wait_s", hint="remove it, or write spot: true")
    limit = job.timeouts.run_s or 86400
    if options.spot and options.max_wait_s is not None and options.max_wait_s < limit:
        message = f"must be at least timeouts.run_s, which is {limit}{'' if job.timeouts.run_s else ' by default'}"
        yield Problem(message, path="sagemaker.max_wait_s", hint=f"write at least {limit}")
    if options.keep_alive_s and job.node_groups:
        yield Problem("warm pools need equal nodes", path="sagemaker.keep_alive_s", hint="remove node_groups")
    if options.training_plan and options.spot:
        yield Problem(
            "nodes of a training plan are not spot nodes", path="sagemaker.spot", hint="remove one of the two fields"
        )
    if options.network_isolation and job.has_agent:
        if any(tier.folder is None for tier in job.checkpoint.durable()):
            hint = "remove the s3 tier, or network_isolation"
            yield Problem("an isolated job cannot reach S3", path="sagemaker.network_isolation", hint=hint)
        elif job.nodes > 1 or job.checkpoint.durable():
            hint = "use one node without a tier of kind file, or remove network_isolation"
            reads = "a job of several nodes" if job.nodes > 1 else "a job with a tier of kind file"
            message = f"{reads} reads its secret from AWS, but an isolated job has no network"
            yield Problem(message, path="sagemaker.network_isolation", hint=hint)
    if options.network_isolation and options.install:
        yield Problem(
            "an isolated job cannot install packages", path="sagemaker.install", hint="put them into the image"
        )
    for index, tier in enumerate(job.checkpoint.tiers):
        on_disk = isinstance(tier, DurableTier) and tier.folder is not None and not tier.on_node
        if on_disk and not any(c.kind == "file-system" and c.access == "rw" for c in options.channels.values()):
            hint = "add a channel of kind file-system with access: rw, or use a tier of kind s3"
            message = "the tier's path is on no file system, because sagemaker.channels mounts none that is writable"
            yield Problem(message, path=f"checkpoint.tiers.{index}", hint=hint)
    if "code" in options.channels:
        hint = "use another name for the channel"
        yield Problem("SageMaker reserves this name for the script", path="sagemaker.channels.code", hint=hint)


def _arguments(job: JobConfig) -> Iterator[Problem]:
    script = PurePosixPath(job.script)
    if (script.is_absolute() or ".." in script.parts) and job.image is None:
        hint = "move it into the folder of this file or below, and write its relative path"
        yield Problem(f"`{job.script}` is outside the folder that is uploaded to SageMaker", path="script", hint=hint)
    if job.mode == "plain":
        try:
            arguments_of(job)
        except ValueError as error:
            hint = "write each argument as `--name value`, without repetitions, or use mode: ours"
            message = f"SageMaker's images accept only arguments `--name value`, each name once, but {error}"
            yield Problem(message, path="args", hint=hint)
        return
    starting = entrypoint_of(job)
    for text in starting["ContainerEntrypoint"]:
        if len(text) > LONGEST_ARGUMENT:
            message = "the command that installs these packages is too long for SageMaker"
            yield Problem(message, path="sagemaker.install", hint="put them into the image")
    for index, text in enumerate(job.args):
        if len(text) > LONGEST_ARGUMENT or "\n" in text:
            long = f"has {len(text)} characters, but an argument on SageMaker has at most {LONGEST_ARGUMENT}"
            message = "contains a line break, which SageMaker does not allow in an argument" if "\n" in text else long
            yield Problem(message, path=f"args.{index}", hint="put the text in a file next to the script")
    if len(job.args) > 100:
        yield Problem(
            "SageMaker allows at most 100 arguments", path="args", hint="put them in a file next to the script"
        )
