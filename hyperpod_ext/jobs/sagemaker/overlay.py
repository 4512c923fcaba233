"""`overlay.sagemaker`: adds the overlay's members to the rendered request, and checks that they do not break the job.

The functions are pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks

_HERE = "overlay.sagemaker.request"
_COUNTED = ("the spec sets number and type of the nodes", "write `nodes`, `resources.instance_type` or `node_groups`")
_ANSWERED = ("SageMaker returns it and accepts no value", "remove it")
_STARTED = ("it starts the launcher", "write `image`, `script` and `args` outside the overlay")
_FIELDS = {
    "RoleArn": "sagemaker.role",
    "OutputDataConfig.S3OutputPath": "sagemaker.output",
    "OutputDataConfig.KmsKeyId": "sagemaker.output_kms_key",
    "StoppingCondition.MaxRuntimeInSeconds": "timeouts.run_s",
    "StoppingCondition.MaxWaitTimeInSeconds": "sagemaker.max_wait_s",
    "StoppingCondition.MaxPendingTimeInSeconds": "sagemaker.max_pending_s",
    "EnableNetworkIsolation": "sagemaker.network_isolation",
    "EnableInterContainerTrafficEncryption": "sagemaker.encrypt_traffic",
    "EnableManagedSpotTraining": "sagemaker.spot",
    "RetryStrategy.MaximumRetryAttempts": "relaunch.max_times",
}
"""Fields of the spec that set members of the request, for hints."""
REFUSED = {
    "TrainingJobName": ("hp-ext finds the job by its name", "write `name`"),
    "AlgorithmSpecification.AlgorithmName": _STARTED,
    "AlgorithmSpecification.ContainerArguments": _STARTED,
    "AlgorithmSpecification.ContainerEntrypoint": _STARTED,
    "AlgorithmSpecification.TrainingImage": _STARTED,
    "AlgorithmSpecification.TrainingInputMode": ("each channel has its own mode", "write `mode` of the channel"),
    "ResourceConfig.InstanceCount": _COUNTED,
    "ResourceConfig.InstanceGroups": _COUNTED,
    "ResourceConfig.InstancePreferences": _COUNTED,
    "ResourceConfig.InstanceType": _COUNTED,
    "ResourceConfig.SelectedInstanceCount": _ANSWERED,
    "ResourceConfig.SelectedInstanceType": _ANSWERED,
    "ServerlessJobConfig": ("SageMaker would then choose the machines and the script", "remove it"),
}
"""Members that an overlay cannot set, each with the reason and a hint."""


def with_overlay(request: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `request` with the members `added`. Mappings are merged, and lists are appended."""
    found: dict[str, Any] = copy.deepcopy(dict(request))
    for name, value in added.items():
        before = found.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            found[name] = with_overlay(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            found[name] = [*before, *copy.deepcopy(value)]
        else:
            found[name] = copy.deepcopy(value)
    return found


def problems(request: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield all problems of an overlay's members.

    Args:
        request: request that was rendered without the overlay.
        added: members of the overlay.

    Raises:
        HyperpodExtError: botocore, which has the model of the request, is not installed.
    """
    from hyperpod_ext.jobs.sagemaker.strict import IS_MISSING, check_request

    found = [*_repeated(request, added, ""), *_promises(request, added)]
    if not found:
        for one in check_request("CreateTrainingJob", with_overlay(request, added)):
            if (path := _within(request, added, one.path)) is not None:
                missing = one.path.rpartition(".")[2]
                absent = one.message == IS_MISSING
                message = f"lacks the required member `{missing}`" if absent else one.message
                found.append(Problem(message, path=path, hint="add it" if absent else one.hint))
    yield from found


def paths(added: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted path of every value in the members of an overlay.

    An example of a path is `StoppingCondition.MaxPendingTimeInSeconds`.
    """
    for name, value in added.items():
        at = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and value:
            yield from paths(value, at)
        else:
            yield at


def _repeated(request: Mapping[str, Any], added: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, value in added.items():
        at = f"{path}.{name}" if path else name
        field = f"`{_FIELDS[at]}`" if at in _FIELDS else "the field of the spec that sets it"
        if at in REFUSED:
            why, hint = REFUSED[at]
            yield Problem(f"cannot be changed: {why}", path=f"{_HERE}.{at}", hint=hint)
        elif value is None:
            yield Problem(
                "cannot be removed, because an overlay only adds members",
                path=f"{_HERE}.{at}",
                hint=f"change {field}",
            )
        elif name not in request:
            below = value if isinstance(value, Mapping) else {}
            yield from _repeated({}, below, at)
        elif isinstance(value, Mapping) and isinstance(request[name], Mapping):
            yield from _repeated(request[name], value, at)
        elif not (isinstance(value, list) and isinstance(request[name], list)):
            message = "is already set by a field of the spec"
            yield Problem(message, path=f"{_HERE}.{at}", hint=f"change {field}")


def _promises(request: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _mapping(added.get("Environment")):
        if is_of_ranks(name) or name.startswith(("SM_", "SAGEMAKER_")):
            message = f"{name} cannot be set, because the launcher or SageMaker sets it on each rank"
            yield Problem(message, path=f"{_HERE}.Environment.{name}", hint="remove it")
    for name in _mapping(added.get("HyperParameters")):
        if name.startswith("sagemaker_"):
            message = "is reserved, because SageMaker's images start the script by it"
            yield Problem(message, path=f"{_HERE}.HyperParameters.{name}", hint="remove it")
    for member, key in (("Tags", "Key"), ("InputDataConfig", "ChannelName")):
        used = {one.get(key) for one in request.get(member, [])} | ({"code"} if key == "ChannelName" else set())
        items = added.get(member)
        for index, one in enumerate(items if isinstance(items, list) else []):
            if isinstance(one, Mapping) and one.get(key) in used:
                at = f"{_HERE}.{member}.{index}"
                yield Problem(f"the {key} {one.get(key)} belongs to the job itself", path=at, hint="use another name")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _within(request: Any, added: Any, path: str) -> str | None:
    """Return the path in the overlay for a path in the complete request; None if the overlay sets no such path.

    Args:
        request: request that was rendered without the overlay.
        added: members of the overlay.
        path: dotted path in the complete request.
    """
    here = _HERE
    for part in path.split(".") if path else ():
        if isinstance(added, list) and part.isdecimal():
            index = int(part) - (len(request) if isinstance(request, list) else 0)
            if not 0 <= index < len(added):
                return None
            here, added, request = f"{here}.{index}", added[index], None
        elif isinstance(added, Mapping) and part in added:
            here, added = f"{here}.{part}", added[part]
            request = request.get(part) if isinstance(request, Mapping) else None
        elif isinstance(added, Mapping) and here != _HERE and not _mapping(request).get(part):
            return here  # a member is missing in the structure that the overlay adds
        else:
            return None
    return here
