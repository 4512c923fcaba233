"""Details of a job on Kubernetes (conditions, pods, events), and kubectl's command lines for its pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.handle import ANYWHERE, JobHandle
from hyperpod_ext.jobs.contract.spec_annotation import read_note
from hyperpod_ext.jobs.contract.targets import running_node
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.jobs import client_of, get_job, kind_of, logs_of


def details(handle: JobHandle) -> dict[str, Any]:
    """Return the conditions of a job, its pods, and its events from oldest to newest.

    Raises:
        NotFoundError: there is no such job.
    """
    client = client_of(handle)
    namespace = client.access.namespace
    kind = kind_of(handle)
    job = get_job(kind, client, handle.name)
    core = f"/api/v1/namespaces/{namespace}"
    pods = list(client.items(f"{core}/pods", labelSelector=f"{kind.pod_label}={handle.name}"))
    names = {(kind.name, handle.name)} | {("Pod", str(pod["metadata"]["name"])) for pod in pods}
    happened = [event for event in client.items(f"{core}/events") if _object_of(event) in names]
    return {
        "conditions": [_condition(one) for one in (job.get("status") or {}).get("conditions") or []],
        "pods": sorted(map(_pod, pods), key=lambda pod: str(pod["name"])),
        "events": sorted(map(_event, happened), key=lambda event: str(event["at"])),
    }


def pods_of(client: Client, handle: JobHandle, *, running: bool) -> list[dict[str, Any]]:
    """Return the pods of a job, sorted by the number in their names.

    Args:
        running: return only pods that are running and not terminating.
    """
    pods = logs_of(kind_of(handle), client, handle.name).pods()
    if not running:
        return pods
    going = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return [pod for pod in going if pod.get("status", {}).get("phase") == "Running"]


def kept_spec(handle: JobHandle) -> JobConfig | None:
    """Return the spec in the annotation of a job; None if the annotation has no spec that this version can read.

    Raises:
        NotFoundError: there is no such job.
    """
    client = client_of(handle)
    kind = kind_of(handle)
    return read_note(get_job(kind, client, handle.name).get("metadata") or {})


def exec_command(handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
    """Return the kubectl command that runs `words` in a pod of the job, as `targets.Shell` defines it."""
    return in_pod(handle, _pod_of(handle, node), words, terminal=terminal)


def forward_command(handle: JobHandle, node: int, ports: Sequence[str]) -> list[str]:
    """Return the kubectl command that forwards ports of a pod of the job, as `targets.Ports` defines it."""
    return [*_kubectl(handle), "port-forward", f"pod/{_pod_of(handle, node)}", *ports]


def in_pod(handle: JobHandle, pod: str, words: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the kubectl command that runs `words` in a pod of the job.

    Args:
        pod: name of the pod.
        terminal: whether the command is interactive and needs a terminal.
    """
    return [*_kubectl(handle), "exec", "-it" if terminal else "-i", pod, "--", *words]


def _kubectl(handle: JobHandle) -> list[str]:
    context = [] if handle.place == ANYWHERE else ["--context", unquote(handle.place.rpartition("@")[2])]
    return ["kubectl", *context, "--namespace", client_of(handle).access.namespace]


def _pod_of(handle: JobHandle, node: int) -> str:
    running = [str(pod["name"]) for pod in details(handle)["pods"] if pod["phase"] == "Running"]
    return running_node(handle, running, node)


def _object_of(event: Mapping[str, Any]) -> tuple[str, str]:
    about = event.get("involvedObject") or {}
    return str(about.get("kind")), str(about.get("name"))


def _condition(found: Mapping[str, Any]) -> dict[str, Any]:
    names = {"type": "type", "status": "status", "reason": "reason", "message": "message", "at": "lastTransitionTime"}
    return {ours: found.get(theirs) or None for ours, theirs in names.items()}


def _pod(found: Mapping[str, Any]) -> dict[str, Any]:
    status = found.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return {
        "name": found["metadata"]["name"],
        "phase": status.get("phase"),
        "node": (found.get("spec") or {}).get("nodeName"),
        "restarts": sum(int(one.get("restartCount") or 0) for one in containers),
        "why": next(_reasons(status, containers), None),
    }


def _reasons(status: Mapping[str, Any], containers: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the reasons why a pod is not ready, the most specific first."""
    for one in containers:
        for state in ("waiting", "terminated"):
            found = (one.get("state") or {}).get(state) or {}
            if found.get("exitCode") == 0:
                continue
            code = f"exit code {found['exitCode']}" if "exitCode" in found else ""
            if text := ": ".join(str(part) for part in (found.get("reason"), found.get("message") or code) if part):
                yield text
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    if text := ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key)):
        yield text


def _event(found: Mapping[str, Any]) -> dict[str, Any]:
    series = found.get("series") or {}
    at = series.get("lastObservedTime") or found.get("lastTimestamp") or found.get("eventTime")
    kind, name = _object_of(found)
    return {
        "at": at or found["metadata"].get("creationTimestamp"),
        "type": found.get("type"),
        "reason": found.get("reason"),
        "object": f"{kind}/{name}",
        "count": series.get("count") or found.get("count") or 1,
        "message": found.get("message"),
    }
