"""Finds mounts that hide the secret files of a pod, and container users that cannot read the secret files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import is_below


def hides_secret(path: str) -> bool:
    """Return whether a mount at `path` hides the folder of the job's secret, or is inside this folder."""
    return is_below(path, labels.SECRET_DIR) or is_below(labels.SECRET_DIR, path)


def unread_secret(
    job: JobConfig, container: Mapping[str, Any], pod: Mapping[str, Any], group: object
) -> tuple[str, str, str, int] | None:
    """Return a problem if the container runs as a user that cannot read a secret file; None otherwise. The files of a
    secret belong to root and to the pod's `fsGroup`.

    Args:
        container: `securityContext` of the training container.
        pod: `securityContext` of the pod.
        group: `fsGroup` of the pod; None if unset.

    Returns:
        `container` or `pod`, the field in its `securityContext` that sets the user, the message, and an `fsGroup` that
        solves the problem.
    """
    if job.has_agent:
        # fsGroup 0 does not help, because the runtime refuses a secret file that root's group may read
        secret, is_read = "the job's secret", bool(group)
    else:
        paths = [volume.path for volume in job.volumes if volume.kind == "secret"]
        secret, is_read = f"the secret at {', '.join(paths)}", group is not None or not paths
    name = "runAsUser" if any(one.get("runAsUser") is not None for one in (container, pod)) else "runAsNonRoot"
    part = "container" if container.get(name) is not None else "pod"
    user = (container if part == "container" else pod).get(name)
    if not user or is_read:
        return None
    who, add = ("a user other than root", 1000) if user is True else (f"user {user}", user)
    why = "the pod has no fsGroup" if group is None else f"the pod's fsGroup is {group}"
    return part, name, f"{who} cannot read {secret}, because {why}", add
