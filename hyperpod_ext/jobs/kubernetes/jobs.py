"""Submits, watches and cancels jobs on Kubernetes, of the kinds HyperPodPyTorchJob, PyTorchJob and TrainJob."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError, UnknownOutcomeError
from hyperpod_ext.jobs.contract.handle import ANYWHERE, JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.contract.spec_annotation import read_note
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.api.kubeconfig import load_access
from hyperpod_ext.jobs.kubernetes.api.last_word import last_word
from hyperpod_ext.jobs.kubernetes.api.pod_logs import PodLogs
from hyperpod_ext.jobs.kubernetes.api.rank_lines import Only
from hyperpod_ext.jobs.kubernetes.kinds import Kind, ended_at, kinds_of, reason_of, state_of
from hyperpod_ext.jobs.kubernetes.mounts import secret_name

POLL_S = 2.0
_CANCEL_TIMEOUT_S = 120.0
_ORDER = ("NetworkPolicy",)
"""Kinds of objects that are created before the job itself."""


def submit(kind: Kind, job: JobConfig, files: Mapping[str, str], dry_run: bool = False) -> JobHandle:
    """Create the job and its other objects on the server; return the job's handle.

    Args:
        kind: kind of the job's object.
        files: name and text of each rendered file.
        dry_run: let the server check the objects without creating them.

    Raises:
        ConflictError: a job with this name already exists, and was not changed.
        UnknownOutcomeError: a response was lost, and the job may have been created.
    """
    client = Client(load_access(job.kubernetes.context, job.kubernetes.namespace))
    objects = [found for text in files.values() for found in read_all(text) if found]
    query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    handle = handle_of(kind, client, job.name)
    namespace = client.access.namespace
    if not dry_run:
        _refuse_a_second(client, kind, job.name)
        if job.has_agent:
            ensure_secret(client, namespace, secret_name(job), job.name)
    made: list[str] = []
    try:
        for found in sorted(objects, key=lambda one: one["kind"] not in _ORDER):
            path = _path_of(found, kind, namespace)
            if found["kind"] in _ORDER:
                made += _put(client, path, found, query)
            else:
                client.create(path, found, **query)
    except UnknownOutcomeError:
        raise  # keep the network policy, because the job may exist
    except HyperpodExtError:
        for path in made:
            client.delete(path)
        raise
    return handle


def ensure_secret(client: Client, namespace: str, name: str, job: str) -> None:
    """Create the job's Secret with random content, unless it exists.

    The Secret is not deleted together with the job, because it signs the job's checkpoints, which are kept.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets"
    metadata = {"name": name, "labels": {labels.MANAGED_BY: "hyperpod-ext", labels.JOB: job}}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    try:
        client.create(path, body | {"stringData": {"secret": secrets.token_hex(32)}})
    except ConflictError:
        return  # keep the existing Secret, which has signed checkpoints of an earlier submission


def list_jobs(kind: Kind, context: str | None = None) -> list[JobStatus]:
    """Return the status of all jobs of this kind in the namespace of a context of the kubeconfig.

    Args:
        context: name of the context; None: the current context.
    """
    client = Client(load_access(context))
    return [_status(kind, client, found) for found in client.items(kind.path(client.access.namespace))]


def known_kinds(kinds: tuple[Kind, ...], client: Client | None = None) -> list[Kind]:
    """Return the kinds in `kinds` that the cluster has.

    Raises:
        NotFoundError: the cluster has none of `kinds`.
    """
    client = client or Client(load_access())
    known: list[Kind] = []
    for kind in kinds:
        try:
            client.get(kind.path(client.access.namespace), limit="1")
        except NotFoundError as error:
            missing = error
        else:
            known.append(kind)
    if not known:
        raise missing
    return known


def kind_of(handle: JobHandle) -> Kind:
    """Return the kind of a job's object.

    If no job has the handle's name, the first kind of the target that the cluster has is returned.
    """
    kinds = kinds_of(handle.target)
    if len(kinds) == 1:
        return kinds[0]
    client = client_of(handle)
    known = known_kinds(kinds, client)
    for kind in known:
        with suppress(NotFoundError):
            get_job(kind, client, handle.name)
            return kind
    return known[0]


def get_job(kind: Kind, client: Client, name: str) -> dict[str, Any]:
    """Return the object of the job `name` from the API server."""
    try:
        return client.get(kind.path(client.access.namespace, name))
    except NotFoundError as error:
        hint = error.hint or f"`hp-ext list --target {kind.target}` lists all"
        raise NotFoundError(error.message, hint=hint) from None


def status(kind: Kind, handle: JobHandle) -> JobStatus:
    """Return the status of a job. The error of a failed job comes from the status of its pods and from the operator."""
    client = client_of(handle)
    now = _status(kind, client, get_job(kind, client, handle.name))
    if now.state != "failed":
        return now
    pods = logs_of(kind, client, handle.name).pods()
    return replace(now, error=last_word(pods, now.error))


def live(kind: Kind, job: JobConfig) -> dict[str, Any]:
    """Return the object of `job` as the API server has it now."""
    client = Client(load_access(job.kubernetes.context, job.kubernetes.namespace))
    return get_job(kind, client, job.name)


def watch(kind: Kind, handle: JobHandle, with_lines: bool, poll_s: float = POLL_S) -> Iterator[StatusUpdate]:
    """Yield an update every `poll_s` seconds, and for each set of new log lines, until the job has ended.

    Args:
        with_lines: also yield the output of the pods.
    """
    client = client_of(handle)
    logs = logs_of(kind, client, handle.name) if with_lines else None
    for now in _until_ended(kind, client, handle):
        if logs is not None:
            logs.look_for_pods()
            lines = logs.finish() if now.ended else []
            yield StatusUpdate(now, lines=tuple(lines))
            for lines in () if now.ended else logs.during(poll_s):
                yield StatusUpdate(now, lines=tuple(lines))
            continue
        yield StatusUpdate(now)
        if not now.ended:
            time.sleep(poll_s)


def logs(
    kind: Kind, handle: JobHandle, rank: int | None = None, follow: bool = False, poll_s: float = POLL_S
) -> Iterator[str]:
    """Yield the output of the job's pods, line by line.

    Args:
        rank: yield only lines of this rank, which are detected by the launcher's prefix; None yields all lines.
        follow: wait for new lines until the job has ended.
        poll_s: seconds between queries of the job's status.
    """
    client = client_of(handle)
    found = get_job(kind, client, handle.name)
    spec = read_note(found.get("metadata") or {})
    if spec is not None:
        handle.check_rank(rank, spec.workers_per_node * (spec.elastic.max_nodes if spec.elastic else spec.nodes))
    only = None if rank is None else Only(rank, _workers_per_node(found))
    reader = logs_of(kind, client, handle.name, only)
    if not follow:
        yield from reader.now()
        return
    for now in _until_ended(kind, client, handle):
        reader.look_for_pods()
        if now.ended:
            yield from reader.finish()
        else:
            for lines in reader.during(poll_s):
                yield from lines


def _until_ended(kind: Kind, client: Client, handle: JobHandle) -> Iterator[JobStatus]:
    """Yield the job's status repeatedly, last of all the final status."""
    seen = False
    while True:
        try:
            found = get_job(kind, client, handle.name)
        except NotFoundError:
            if not seen:
                raise
            hint = "the job was cancelled, or its retention time has ended"
            raise NotFoundError(f"{handle.name} was deleted while hp-ext watched it", hint=hint) from None
        seen = True
        now = _status(kind, client, found)
        yield now
        if now.ended:
            return


def cancel(kind: Kind, handle: JobHandle, poll_s: float = POLL_S) -> JobStatus:
    """Delete the job, and return when its pods have ended. A job that has already ended is not deleted."""
    client = client_of(handle)
    namespace = client.access.namespace
    before = _status(kind, client, get_job(kind, client, handle.name))
    if before.ended:
        return before
    client.delete(kind.path(namespace, handle.name))
    pods = logs_of(kind, client, handle.name)
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    while left := pods.pods():
        if time.monotonic() > deadline:
            names = ", ".join(pod["metadata"]["name"] for pod in left)
            hint = f"kubectl describe pod {left[0]['metadata']['name']} shows why the pod does not end"
            raise HyperpodExtError(f"{handle.name} is deleted, but its pods do not end: {names}", hint=hint)
        time.sleep(poll_s)
    with suppress(NotFoundError):  # jobs can run without a network policy
        client.delete(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{handle.name}-hpx")
    return JobStatus(before.name, before.handle, "cancelled", submitted_at=before.submitted_at)


def result(kind: Kind, handle: JobHandle) -> dict[str, Any]:
    """Return the final status of an ended job as a report.

    Raises:
        NotFoundError: the job has not ended.
    """
    now = status(kind, handle)
    if not now.ended:
        raise handle.no_result()
    known = {"name": now.name, "target": kind.target, "handle": str(handle), "state": now.state, "error": now.error}
    return known | {"submitted_at": now.submitted_at, "ended_at": now.ended_at}


def handle_of(kind: Kind, client: Client, name: str) -> JobHandle:
    """Return the handle of the job `name`, such as `hyperpod-eks://NAMESPACE@CONTEXT/NAME`.

    Slashes in the name of the context are escaped.
    """
    return JobHandle(kind.target, f"{client.access.namespace}@{quote(client.access.context, safe=':')}", name)


def client_of(handle: JobHandle) -> Client:
    """Return a client for the context and namespace in a handle.

    For a handle that was made from a bare name, the client uses the kubeconfig's current context.
    """
    if handle.place == ANYWHERE:
        return Client(load_access())
    namespace, at, context = handle.place.rpartition("@")
    return Client(load_access(unquote(context), namespace if at else None))


def _refuse_a_second(client: Client, kind: Kind, name: str) -> None:
    client.get(kind.path(client.access.namespace), limit="1")  # `get` raises an error if the cluster lacks the kind
    with suppress(NotFoundError):
        get_job(kind, client, name)
        hint = f"cancel it with `hp-ext cancel {handle_of(kind, client, name)}`, or use another name"
        raise ConflictError(f"a {kind.name} named {name} exists already", hint=hint)


def _put(client: Client, path: str, found: dict[str, Any], query: Mapping[str, str]) -> list[str]:
    """Create or replace an object on the server.

    Returns the paths of the objects that were created and not replaced, which the caller deletes after a failure.
    """
    own = f"{path}/{found['metadata']['name']}"
    try:
        client.create(path, found, **query)
    except ConflictError:
        client.replace(own, found, **query)
        return []
    return [] if "dryRun" in query else [own]


def _path_of(found: Mapping[str, Any], kind: Kind, namespace: str) -> str:
    if found["kind"] == "NetworkPolicy":
        return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    return kind.path(namespace)


def logs_of(kind: Kind, client: Client, name: str, only: Only | None = None) -> PodLogs:
    """Return a reader of the logs of a job's pods.

    Args:
        only: rank whose lines are read; None reads the lines of all ranks.
    """
    return PodLogs(client, client.access.namespace, f"{kind.pod_label}={name}", only)


def _status(kind: Kind, client: Client, found: Mapping[str, Any]) -> JobStatus:
    metadata = found.get("metadata") or {}
    name, state = str(metadata.get("name", "")), state_of(found)
    return JobStatus(
        name=name,
        handle=str(handle_of(kind, client, name)),
        state=state,
        submitted_at=str(metadata.get("creationTimestamp") or ""),
        ended_at=ended_at(found) if state in ("succeeded", "failed") else None,
        error=reason_of(found) if state == "failed" else None,
    )


def _workers_per_node(found: Mapping[str, Any]) -> int:
    spec = read_note(found.get("metadata") or {})
    if spec is not None:
        return spec.workers_per_node
    written = str((found.get("spec") or {}).get("nprocPerNode", "1"))
    return int(written) if written.isdecimal() and written != "0" else 1
