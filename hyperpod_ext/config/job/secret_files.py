"""Finds mounts that hide a pod's secret files, and users that cannot read these files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import is_below


def hides_secret(path: str) -> bool:
    """Return whether a mount at `path` hides the folder of the job's secret, or is inside it."""
    return is_below(path, labels.SECRET_DIR) or is_below(labels.SECRET_DIR, path)


def unread_secret(
    job: JobConfig, container: Mapping[str, Any], pod: Mapping[str, Any], group: object
) -> tuple[str, str, str, int] | None:
    """Find a user other than root who cannot read a secret. The files of a secret belong to root and to the pod's
    group.

    Args:
        container: its `securityContext`.
        pod: its `securityContext`.
        group: `fsGroup` of the pod.

    Returns:
        `container` or `pod`, the field that sets the user, the message, and a group to add.
    """
    if job.has_agent:
        # the runtime refuses a secret file that root's group may read
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
    return part, name, f"{who} cannot read {secret}: the pod has no fsGroup", add
