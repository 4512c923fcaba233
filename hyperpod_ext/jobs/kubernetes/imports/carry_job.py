"""What of others' jobs, besides pods, a spec has no field for: as its overlay, where that means the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.jobs.contract.targets import get_target

_SECTIONS = ("runPolicy", "elasticPolicy")
_COUNTED = {"minReplicas", "maxReplicas"}
"""Fields of the spec say them."""


def with_job_fields(job: JobConfig, target: str, found: Mapping[str, Any], rendered: Mapping[str, Any]) -> JobConfig:
    """`job` with an overlay of what the policies of `found` say and those of `rendered` do not."""
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
        return job  # values that JSON has no words for
    changed = job.model_copy(update={"overlay": job.overlay.model_copy(update={"kubernetes": overlay})})
    return job if any(True for _problem in get_target(target).problems(changed)) else changed


def _differs(ours: Any, theirs: Any) -> bool:
    """Whether ours is another, or none; of mappings, only those that are not there at all are carried."""
    return ours is None if isinstance(theirs, dict) else str(ours) != str(theirs)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
