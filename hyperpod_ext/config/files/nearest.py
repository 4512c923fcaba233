"""Suggests a valid name for an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ELSEWHERE = {
    "gpus": "accelerators",
    "gpu": "accelerators",
    "num_gpus": "accelerators",
    "secrets": "secret_env",
    "environment": "env",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "replicas": "nodes",
    "nproc_per_node": "workers_per_node",
    "entrypoint": "script",
    "service_account_name": "service_account",
    "image_pull_policy": "pull_policy",
    "image_pull_secrets": "pull_secrets",
    "priority_class_name": "pod_priority_class",
    "termination_grace_period_seconds": "termination_grace_s",
}
"""Names of fields in a spec, by the names of the same fields in other tools."""


def known_as(name: str) -> str:
    """Return the name in a spec of a field that Kubernetes or another tool calls `name`."""
    ours = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return _ELSEWHERE.get(ours, ours)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to `name`; None if no valid name is similar."""
    by_lower = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest_or_list(name: str, valid: Iterable[str], command: str) -> str:
    """Return a hint with the valid name that is most similar to `name`, if one is similar, and the command that lists
    all names."""
    found = nearest(name, valid)
    return (f"did you mean `{found}`? " if found else "") + f"`{command}` lists all"


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return a hint with the valid name that is most similar to `name`, or with all valid names if none is similar."""
    names = list(valid)
    found = nearest(name, names)
    return f"did you mean `{found}`?" if found else f"valid: {', '.join(names)}" if names else ""
