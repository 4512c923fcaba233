"""Imports volumes of a pod that must keep their names, into `kubernetes.pod.volumes`. Pure.

The spec's section `volumes` can express the usual kinds of volumes in a shorter form, without names. Other kinds of
volumes, and volumes that side containers mount, are imported with their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.pods.fields import fits
from hyperpod_ext.jobs.kubernetes.imports.shape import mapping, mappings
from hyperpod_ext.jobs.kubernetes.mounts import is_ours

Items = list[dict[str, Any]]
_PLAIN = {
    "persistentVolumeClaim": {"claimName", "readOnly"},
    "hostPath": {"path"},
    "emptyDir": {"medium", "sizeLimit"},
    "configMap": {"name"},
    "secret": {"secretName", "defaultMode"},
}
"""Kinds of volumes that a spec's `volumes` can express, each with the fields that it can express."""
_PLAIN_MOUNT = {
    "persistentVolumeClaim": {"name", "mountPath", "readOnly", "subPath"},
    "hostPath": {"name", "mountPath", "readOnly"},
}
_OWNER_ONLY = 0o400


def take_named(pod: Mapping[str, Any], ours: bool) -> tuple[Items, Items]:
    """Return the volumes that keep their names, and the first container's mounts of these volumes.

    Args:
        ours: whether hp-ext rendered the pod, so that volumes of the spec's `volumes` are recognised by their names.
    """
    first, *others = pod.get("containers") or [{}]
    volumes = mappings(pod.get("volumes"))
    elsewhere = {
        str(mount.get("name"))
        for container in [*others, *mappings(pod.get("initContainers"))]
        for mount in mappings(mapping(container).get("volumeMounts"))
    }
    devices = {str(one.get("name")) for one in mappings(first.get("volumeDevices"))}
    mounts = mappings(first.get("volumeMounts"))
    kept: Items = []
    for volume in volumes:
        name = str(volume.get("name"))
        its = [mount for mount in mounts if mount.get("name") == name]
        shared = name in elsewhere | devices
        named = not is_ours(name) if ours else shared or not _is_plain(volume, its)
        if named and fits("TrainingPod", {"volumes": [volume]}) and fits("TrainingContainer", {"volumeMounts": its}):
            kept.append(volume)
    names = {one["name"] for one in kept}
    return kept, [mount for mount in mounts if mount.get("name") in names]


def _is_plain(volume: Mapping[str, Any], mounts: Items) -> bool:
    """Return whether a spec's `volumes` can express a volume and its mounts.

    Args:
        mounts: mounts of the volume in the first container.
    """
    kinds = [kind for kind in volume if kind != "name"]
    if len(kinds) != 1 or kinds[0] not in _PLAIN or not mounts:
        return False
    (kind,) = kinds
    source = mapping(volume[kind])
    if not source.keys() <= _PLAIN[kind] or source.get("defaultMode", _OWNER_ONLY) != _OWNER_ONLY:
        return False
    if source.get("readOnly") and not all(mount.get("readOnly") for mount in mounts):
        return False
    if kind == "secret" and "defaultMode" not in source and volume["name"] != labels.SECRET_VOLUME:
        return False  # hp-ext would render another file mode for the Secret, 0400
    return all(mount.keys() <= _PLAIN_MOUNT.get(kind, {"name", "mountPath"}) for mount in mounts)
