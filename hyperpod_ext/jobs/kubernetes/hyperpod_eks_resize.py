"""Resizes a running HyperPodPyTorchJob by changing the bounds within which the operator scales the job.

The operator uses all free nodes up to `maxReplicas`. A lower `maxReplicas` removes nodes. With a higher `maxReplicas`,
nodes join as soon as they are free. After each resize, the job's processes restart with the state in memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.counts import count
from hyperpod_ext.errors import ConfigError, ConflictError, Problem, UnsupportedError, WaitTimeoutError
from hyperpod_ext.jobs.contract import resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.spec_annotation import read_note
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.details import pods_of
from hyperpod_ext.jobs.kubernetes.jobs import POLL_S, client_of
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, state_of

_TRIES = 5
"""Maximum number of attempts to change a job. An attempt fails if the operator or another client changes the job at the
same time."""


@dataclass(frozen=True, slots=True)
class PendingResize:
    """A requested resize: the job's bounds have been changed, but its pods have not."""

    handle: JobHandle
    client: Client
    name: str
    """Version (resourceVersion) of the job's object with the new bounds."""
    nodes: int
    of: int
    pods: int
    """Number of pods that will run after the resize, including spares."""
    note: str


def order(handle: JobHandle, nodes: int) -> PendingResize:
    """Change the job's bounds so that the operator gives the job at most `nodes` nodes.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job has ended, or other clients keep changing it.
        ConfigError: the spec does not allow this number of nodes, or the API server refuses the bounds.
        UnsupportedError: hp-ext did not create the job, so its bounds are unknown.
    """
    client = client_of(handle)
    path = HYPERPOD.path(client.access.namespace, handle.name)
    for attempt in range(_TRIES):
        found = client.get(path)
        job = _spec_of(handle, found)
        if problem := resize.refusal(job, nodes):
            raise ConfigError([problem])
        if state_of(found) in ("succeeded", "failed"):
            raise ConflictError(
                f"{handle.name} has ended ({state_of(found)})", hint="start the job again with `hp-ext create-job`"
            )
        try:
            kept = client.replace(path, bounded(found, job, nodes), fieldValidation="Strict")
        except ConflictError:
            if attempt == _TRIES - 1:
                raise
            continue
        running = len(pods_of(client, handle, running=True))
        version = str(kept["metadata"].get("resourceVersion", ""))
        note = f"the operator now uses up to {count(nodes, 'node')}, as soon as they are free"
        return PendingResize(handle, client, version, nodes, max(0, running - job.spares), nodes + job.spares, note)
    raise AssertionError("unreachable")


def bounded(found: Mapping[str, Any], job: JobConfig, nodes: int) -> dict[str, Any]:
    """Return a copy of the job's object `found` whose maximum is `nodes` nodes. Pure.

    If the job has groups of nodes, the maximum of the last groups is lowered first.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(found))
    spec = changed["spec"]
    policy = spec["elasticPolicy"]
    policy["maxReplicas"] = nodes
    assert job.elastic is not None
    if job.elastic.sizes:
        policy["replicaDiscreteValues"] = [size for size in job.elastic.sizes if size <= nodes]
    groups = [(group.name, group.max_nodes or group.nodes) for group in job.node_groups]
    most_of = dict(groups) or {one["name"]: job.elastic.max_nodes for one in spec["replicaSpecs"]}
    left = nodes
    for one in spec["replicaSpecs"]:
        most = min(left, most_of[one["name"]])
        left -= most
        one["replicas"], one["maxReplicas"] = min(int(one.get("replicas", 0)), most), most
    return changed


def outcome(ordered: PendingResize, timeout_s: float | None) -> dict[str, Any]:
    """Wait until the requested number of pods runs; return the old and the new number of nodes.

    Args:
        timeout_s: maximum seconds to wait; None waits without a limit.

    Raises:
        ConflictError: the job ended before the resize was done.
        WaitTimeoutError: the resize takes longer than `timeout_s`.
    """
    client, name = ordered.client, ordered.handle.name
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while len(pods_of(client, ordered.handle, running=True)) != ordered.pods:
        state = state_of(client.get(HYPERPOD.path(client.access.namespace, name)))
        if state in ("succeeded", "failed"):
            raise ConflictError(f"{name} has ended ({state}) before it was resized")
        if deadline is not None and time.monotonic() > deadline:
            hint = (
                f"`kubectl get pods -l {HYPERPOD.pod_label}={name}` shows the pods; more are added when nodes are free"
            )
            raise WaitTimeoutError(f"{name} has not been resized within {timeout_s:g} s", hint=hint)
        time.sleep(POLL_S)
    return {"nodes": ordered.nodes, "of": ordered.of}


def _spec_of(handle: JobHandle, found: Mapping[str, Any]) -> JobConfig:
    job = read_note(found.get("metadata") or {})
    if job is None:
        edit = f"kubectl edit {HYPERPOD.plural} {handle.name}"
        hint = f"change spec.elasticPolicy and spec.replicaSpecs with `{edit}` instead"
        message = f"{handle.name} cannot be resized: it was not created by this version of hp-ext"
        raise UnsupportedError([Problem(message, hint=hint)])
    return job
