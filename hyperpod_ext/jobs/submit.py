"""Submission of a plan. The target receives exactly the files that were rendered for the plan."""

from __future__ import annotations

import json

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.plan_type import Plan
from hyperpod_ext.jobs.contract.render import check_shell
from hyperpod_ext.jobs.contract.targets import REHEARSAL, get_target


def submit(plan: Plan) -> JobHandle:
    """Check the rendered files of the plan, then start its job; return the job's handle.

    Raises:
        ConflictError: the job's name or a fixed port is in use.
    """
    read_back(plan)
    return get_target(plan.target).submit(plan)


def rehearse(plan: Plan) -> None:
    """Check the plan on the target's server without creating any object on the server.

    Raises:
        UnsupportedError: the target has no server that can check a plan.
    """
    read_back(plan)
    REHEARSAL.of(plan.target).rehearse(plan)


def read_back(plan: Plan) -> None:
    """Check the rendered files against shell syntax, the Kubernetes schemas, and the model of SageMaker's API.

    Raises:
        ConfigError: the server would refuse a file.
        HyperpodExtError: a file is not valid shell, or the checker is not installed.
    """
    for name, text in plan.files.items():
        if name.endswith((".sh", ".sbatch")):
            check_shell(name, text)
        if name.endswith(".json"):
            from hyperpod_ext.jobs.sagemaker.strict import check_request

            if found := check_request("CreateTrainingJob", json.loads(text)):
                raise ConfigError(found)
        if name.endswith(".yaml"):
            from hyperpod_ext.jobs.kubernetes.schemas import check_yaml

            check_yaml(name, text)
