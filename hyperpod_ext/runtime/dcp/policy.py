"""Read the checkpoint policy that a script passes as an object, as a mapping, or as the path of a job's spec."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.membership.parity_groups import without_agent

Policy = CheckpointPolicy | Mapping[str, Any] | str | os.PathLike[str]


def policy_of(job: str, given: Policy | None, environ: Mapping[str, str] = os.environ) -> CheckpointPolicy:
    """Return the checkpoint policy, after checking the policy and the job's name.

    Args:
        job: the job's name.
        given: the script's policy; None: the policy of the environment's job config, or else the default policy.

    Raises:
        ConfigError: the policy or the job's name is invalid. The ConfigError lists all problems.
        NotFoundError: the spec file does not exist.
    """
    try:
        policy = _read(given, environ)
    except ValidationError as error:
        raise _config_error(CheckpointPolicy, given, error) from None
    try:
        RuntimeConfig(name=job, nodes=1, workers_per_node=1, checkpoint=policy)
    except ValidationError as error:
        config = {"name": job, "nodes": 1, "workers_per_node": 1, "checkpoint": policy.model_dump(mode="json")}
        raise _config_error(RuntimeConfig, config, error) from None
    if (problem := without_agent(policy)) is not None:
        raise ConfigError([problem])
    return policy


def _read(given: Policy | None, environ: Mapping[str, str]) -> CheckpointPolicy:
    match given:
        case CheckpointPolicy():
            return given
        case None:
            text = environ.get(ENV_RUNTIME)
            return RuntimeConfig.from_json(text).checkpoint if text else CheckpointPolicy()
        case Mapping():
            return CheckpointPolicy.model_validate_json(_text(given))  # validate as JSON, which allows lists for tuples
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(
            [Problem(f"a policy is a mapping or the path of a job's spec, not {given!r}", source="Tiers")]
        )
    # import the YAML reader only here, because only a policy in a spec file needs it
    job: JobConfig = import_module("hyperpod_ext.config.files.load").load(JobConfig, Path(given))
    return job.checkpoint


def _text(given: object) -> str:
    return json.dumps(given, default=os.fspath)


def _config_error(model: type[Config], given: object, error: ValidationError) -> ConfigError:
    """Return a ConfigError with the messages that the same mistakes would cause in a spec file."""
    try:
        import_module("hyperpod_ext.config.files.load").load_text(model, _text(given), "Tiers")
    except ConfigError as found:
        return ConfigError([replace(problem, line=None) for problem in found.problems])
    # the script's policy is valid, so the error is in the job's config in the environment
    return ConfigError([Problem(str(each["msg"]), source="Tiers") for each in error.errors()])
