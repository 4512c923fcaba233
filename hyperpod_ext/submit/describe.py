"""One job with everything around it: its status, and on Kubernetes its pods, conditions and events too."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from hyperpod_ext.submit.contract.handle import JobHandle
from hyperpod_ext.submit.contract.targets import get_target

DETAILS = {
    "hyperpod-eks": "hyperpod_ext.submit.kubernetes.details",
    "kubeflow": "hyperpod_ext.submit.kubernetes.details",
}
"""Targets that know more of a job than its status, and the module that asks."""


class Details(Protocol):
    """What a target's module for details can do."""

    def details(self, handle: JobHandle) -> dict[str, Any]:
        """`conditions`, `pods` and `events` of the job."""


def describe(handle: JobHandle) -> dict[str, Any]:
    """The members of `JobStatus`, and `conditions`, `pods` and `events`, which are None where the target has none.

    Raises:
        NotFoundError: there is no such job.
    """
    found: dict[str, Any] = {"conditions": None, "pods": None, "events": None}
    found |= get_target(handle.target).status(handle).to_json()
    if handle.target in DETAILS:
        found |= cast(Details, importlib.import_module(DETAILS[handle.target])).details(handle)
    return found
