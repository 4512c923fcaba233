"""Finds and deletes the remaining objects of an ended job: the job, its pods, its NetworkPolicy and its Secret."""

from __future__ import annotations

from contextlib import suppress

from hyperpod_ext.catalog import labels
from hyperpod_ext.errors import ConflictError, NotFoundError
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.jobs import client_of, known_kinds
from hyperpod_ext.jobs.kubernetes.kinds import Kind, kinds_of, state_of

_COLLECTIONS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Secret": "/api/v1/namespaces/{}/secrets",
}


def find(handle: JobHandle, with_secret: bool) -> list[tuple[str, str]]:
    """Return kind and name of each remaining object of the job, in the order of deletion.

    Args:
        with_secret: also return the Secret that the submission created. Never returns a Secret that the spec names.

    Raises:
        ConflictError: the job has not ended.
        NotFoundError: the job has no remaining objects.
    """
    client = client_of(handle)
    found: list[tuple[str, str]] = []
    kinds = known_kinds(kinds_of(handle.target), client)
    for kind in kinds:
        with suppress(NotFoundError):
            job = client.get(kind.path(client.access.namespace, handle.name))
            if state_of(job) not in ("succeeded", "failed"):
                hint = f"cancel it first: hp-ext cancel {handle}"
                raise ConflictError(f"{handle.name} has not ended", hint=hint)
            found.append((kind.name, handle.name))
    for kind in kinds:
        found += _labelled(client, "Pod", kind.pod_label, handle.name)
    found += _labelled(client, "NetworkPolicy", labels.JOB, handle.name)
    if with_secret:
        found += _labelled(client, "Secret", labels.JOB, handle.name)
    if not found:
        raise NotFoundError(f"{handle.name} has no objects", hint=f"`hp-ext list --target {handle.target}` lists all")
    return found


def delete(handle: JobHandle, found: list[tuple[str, str]]) -> None:
    """Delete the objects in `found`; ignore objects that no longer exist."""
    client = client_of(handle)
    kinds: dict[str, Kind] = {kind.name: kind for kind in kinds_of(handle.target)}
    for kind, name in found:
        namespace = client.access.namespace
        path = kinds[kind].path(namespace, name) if kind in kinds else f"{_COLLECTIONS[kind].format(namespace)}/{name}"
        with suppress(NotFoundError):  # Kubernetes may already have deleted the pods together with the job
            client.delete(path)


def _labelled(client: Client, kind: str, label: str, name: str) -> list[tuple[str, str]]:
    path = _COLLECTIONS[kind].format(client.access.namespace)
    return sorted((kind, str(one["metadata"]["name"])) for one in client.items(path, labelSelector=f"{label}={name}"))
