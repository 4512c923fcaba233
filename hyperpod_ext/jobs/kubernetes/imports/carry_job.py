"""Import of job fields without a field in a spec, as its overlay. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.jobs.contract.targets import get_target

_SECTIONS = ("runPolicy", "elasticPolicy")
_COUNTED = {"minReplicas", "maxReplicas"}
"""Fields that a spec has."""


def with_job_fields(job: JobConfig, target: str, found: Mapping[str, Any], rendered: Mapping[str, Any]) -> JobConfig:
    """Return `job` with an overlay of the policy fields in `found` that `rendered` lacks."""
    patch: dict[str, dict[str, Any]] = {}
    for section in _SECTIONS:
        theirs, ours = (_mapping(_mapping(one.get("spec")).get(section)) for one in (found, rendered))
        if section == "elasticPolicy" and not ours:
            continue  # the job is not elastic
        wanted = {
            name: value for name, value in theirs.items() if name not in _COUNTED and _differs(ours.get(name), value)
        }
        if wanted:
            patch[section] = wanted
    if not patch:
        return job
    before = job.overlay.kubernetes.model_dump()
    try:
        overlay = KubernetesOverlay.model_validate({**before, "job": {"spec": patch}})
    except ValidationError:
        return job  # values that JSON cannot express
    changed = job.model_copy(update={"overlay": job.overlay.model_copy(update={"kubernetes": overlay})})
    return job if any(True for _problem in get_target(target).problems(changed)) else changed


def _differs(ours: Any, theirs: Any) -> bool:
    """Whether ours has another value or none. Mappings differ only if ours is missing."""
    return ours is None if isinstance(theirs, dict) else str(ours) != str(theirs)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
