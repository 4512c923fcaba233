"""Cordons and drains nodes of a Kubernetes cluster as `kubectl drain` does, and makes them schedulable again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hyperpod_ext.errors import ConflictError, NotFoundError
from hyperpod_ext.jobs.kubernetes.api.client import Client

_TRIES = 5
_MIRROR = "kubernetes.io/config.mirror"


def find_nodes(client: Client, names: Sequence[str]) -> list[str]:
    """Return the names of nodes in Kubernetes, without repetitions.

    Args:
        names: names of nodes in Kubernetes, or ids of instances, such as `i-0abc` for the node `hyperpod-i-0abc`.

    Raises:
        NotFoundError: there is no node for one of `names`.
    """
    found: dict[str, None] = {}
    for name in names:
        tried = [name, f"hyperpod-{name}"] if name.startswith("i-") else [name]
        for one in tried:
            with suppress(NotFoundError):
                found[str(client.get(f"/api/v1/nodes/{one}")["metadata"]["name"])] = None
                break
        else:
            hint = "`kubectl get nodes` lists the nodes; check that the current context is for this cluster"
            raise NotFoundError(f"{client.access.context} has no node {name}", hint=hint)
    return list(found)


def pods_on(client: Client, nodes: Sequence[str]) -> list[dict[str, str]]:
    """Return `namespace`, `name` and `node` of each pod that a drain of `nodes` evicts.

    A drain evicts all pods except ended pods, static pods and pods of daemon sets.
    """
    return [
        {"namespace": pod["metadata"].get("namespace", "default"), "name": pod["metadata"]["name"], "node": node}
        for node in nodes
        for pod in client.items("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")
        if _is_evicted(pod)
    ]


def cordon(client: Client, nodes: Sequence[str], cordoned: bool = True) -> None:
    """Make nodes unschedulable; with `cordoned=False`, make them schedulable again."""
    for name in nodes:
        for tries_left in reversed(range(_TRIES)):
            node = client.get(f"/api/v1/nodes/{name}")
            if bool(node.get("spec", {}).get("unschedulable")) == cordoned:
                break
            node["spec"] = {**node.get("spec", {}), "unschedulable": cordoned}
            try:
                client.replace(f"/api/v1/nodes/{name}", node)
                break
            except ConflictError:  # the node was changed since `get`, perhaps by an attempt whose response was lost
                if not tries_left:
                    raise


def evict(client: Client, pods: Sequence[Mapping[str, str]]) -> None:
    """Request the eviction of each pod. Evicted pods end within their grace period.

    Raises:
        UnreachableError: a disruption budget does not allow the eviction of a pod now. The eviction of all earlier
            pods in `pods` has already been requested.
    """
    version = _eviction_version(client) if pods else ""
    for pod in pods:
        path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/eviction"
        metadata = {"name": pod["name"], "namespace": pod["namespace"]}
        body = {"apiVersion": version, "kind": "Eviction", "metadata": metadata}
        with suppress(NotFoundError):  # ignore pods that have already ended
            client.evict(path, body)


def _is_evicted(pod: Mapping[str, Any]) -> bool:
    metadata = pod["metadata"]
    owners = [owner.get("kind") for owner in metadata.get("ownerReferences") or []]
    static = _MIRROR in (metadata.get("annotations") or {})
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not (static or ended or "DaemonSet" in owners)


def _eviction_version(client: Client) -> str:
    """Return the version of the policy API that the server supports: policy/v1, or an older version."""
    for resource in client.get("/api/v1").get("resources") or []:
        if resource.get("name") == "pods/eviction" and resource.get("version"):
            return f"{resource.get('group', 'policy')}/{resource['version']}"
    return "policy/v1"
