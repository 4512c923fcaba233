"""Sections with Kubernetes' own fields, merged with fields from the rest of a spec. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.config.job.job import JobConfig

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def written(job: JobConfig) -> Iterator[str]:
    """Yield the paths of the fields in both sections."""
    for section in ("container", "pod"):
        for field in getattr(job.kubernetes, section):
            yield f"kubernetes.{section}.{field}"


def with_limits(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the section's limits and claims to the requests and limits from `resources`."""
    return dict(ours) | {"limits": {**ours["limits"], **theirs.get("limits", {})}, "claims": theirs.get("claims")}


def both_affinities(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two affinities. Node terms are alternatives, so that each gets our conditions; other rules are added."""
    found = copy.deepcopy(dict(theirs))
    if needed := ours.get("nodeAffinity"):
        (own,) = needed[_REQUIRED]["nodeSelectorTerms"]
        nodes = found.setdefault("nodeAffinity", {})
        terms = nodes[_REQUIRED]["nodeSelectorTerms"] if _REQUIRED in nodes else [{}]
        expressions = [[*term.get("matchExpressions", []), *own["matchExpressions"]] for term in terms]
        both = [term | {"matchExpressions": one} for term, one in zip(terms, expressions, strict=True)]
        nodes[_REQUIRED] = {"nodeSelectorTerms": both}
    if apart := ours.get("podAntiAffinity"):
        others = found.setdefault("podAntiAffinity", {})
        others[_REQUIRED] = [*others.get(_REQUIRED, []), *apart[_REQUIRED]]
    return found


def without_ours(affinity: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Remove `ours` from an affinity: the inverse of `both_affinities`."""
    found = copy.deepcopy(dict(affinity))
    if needed := ours.get("nodeAffinity"):
        (own,) = needed[_REQUIRED]["nodeSelectorTerms"]
        terms = mappings(mapping(mapping(found.get("nodeAffinity")).get(_REQUIRED)).get("nodeSelectorTerms"))
        for term in terms:
            kept = [one for one in mappings(term.get("matchExpressions")) if one not in own["matchExpressions"]]
            _put(term, "matchExpressions", kept)
        if terms:
            left = [term for term in terms if term]
            _put(found["nodeAffinity"], _REQUIRED, {"nodeSelectorTerms": left} if left else {})
            _put(found, "nodeAffinity", found["nodeAffinity"])
    if apart := ours.get("podAntiAffinity"):
        others = mapping(found.get("podAntiAffinity"))
        if _REQUIRED in others:
            _put(others, _REQUIRED, [one for one in mappings(others[_REQUIRED]) if one not in apart[_REQUIRED]])
            _put(found, "podAntiAffinity", others)
    return found


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value:
        holder[name] = value
    else:
        holder.pop(name, None)


def mapping(value: Any) -> dict[str, Any]:
    """Return `value`, or an empty mapping if it is none."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the mappings in the list `value`, or none if it is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
