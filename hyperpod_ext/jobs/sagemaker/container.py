"""Members of the request that start the container: entry point, environment, and arguments of the script. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig, split_variable
from hyperpod_ext.jobs.contract.spec_annotation import note_text

ENV_SECRET_ID = "HPX_SECRET_ID"
ENV_SPEC = "HPX_SPEC"
"""Environment variable with the spec from which the request was rendered. `hp-ext import` reads the variable from the
request; the container does not read the variable."""
LONGEST_VARIABLE = 512
"""Maximum number of characters that SageMaker allows in the value of an environment variable."""
MOST_VARIABLES = 100
LONGEST_ARGUMENT = 256
ENTRY = ("python3", "-m", "hyperpod_ext.runtime.container_sagemaker")


def environment_of(job: JobConfig) -> dict[str, str]:
    """Return the environment variables of every node. Runtime settings or a spec that are too long for one variable are
    split into several variables.

    The variables with the spec are left out if SageMaker would refuse so many variables.
    """
    runtime = (
        split_variable(ENV_RUNTIME, RuntimeConfig.of(job).model_dump_json(), LONGEST_VARIABLE)
        if job.mode != "plain"
        else {}
    )
    secret = {ENV_SECRET_ID: secret_id(job)} if needs_secret(job) else {}
    needed = {**job.env, **runtime, **secret}
    note = split_variable(ENV_SPEC, note_text(job), LONGEST_VARIABLE)
    return needed | note if len(needed) + len(note) <= MOST_VARIABLES else needed


def needs_secret(job: JobConfig) -> bool:
    """Return whether the job needs a secret, with which nodes authenticate each other or sign checkpoints."""
    return job.has_agent and (job.nodes > 1 or bool(job.checkpoint.durable()))


def secret_id(job: JobConfig) -> str:
    """Return the name or ARN of the job's secret in Secrets Manager."""
    return job.sagemaker.secret or f"hyperpod_ext/{job.name}"


def entrypoint_of(job: JobConfig) -> dict[str, Any]:
    """Return the members of AlgorithmSpecification that start the container.

    In mode `plain`, the result is empty, because the image's own entry point starts torchrun.
    """
    if job.mode == "plain":
        return {}
    start = list(ENTRY)
    if job.sagemaker.install:
        wanted = " ".join(shlex.quote(name) for name in job.sagemaker.install)
        start = ["sh", "-c", f'python3 -m pip install -q {wanted} && exec {shlex.join(ENTRY)} "$@"', "sh"]
    return {"ContainerEntrypoint": start} | ({"ContainerArguments": list(job.args)} if job.args else {})


def arguments_of(job: JobConfig) -> dict[str, str]:
    """Return the script's arguments as hyperparameters, which SageMaker's images turn into arguments again.

    Raises:
        ValueError: an argument is not an option with a value, or its option is repeated.
    """
    found: dict[str, str] = {}
    for name, value in _pairs(job.args):
        if name in found:
            raise ValueError(f"`--{name}` is repeated")
        found[name] = value
    return found


def _pairs(args: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    rest = list(args)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not name or (not equals and not rest):
            raise ValueError(f"`{option}` does not have this form")
        yield name, value if equals else rest.pop(0)
