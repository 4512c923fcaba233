"""Reboots and replaces nodes of a HyperPod cluster with SageMaker's batch APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from hyperpod_ext.clusters.existing import nodes
from hyperpod_ext.clusters.request import Request
from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.jobs.sagemaker.client import call, client

Action = Literal["reboot", "replace"]

MOST_IN_A_REQUEST = 25
_OPERATIONS = {"reboot": "BatchRebootClusterNodes", "replace": "BatchReplaceClusterNodes"}
_ERRORS: Mapping[str, type[HyperpodExtError]] = {
    "InstanceIdNotFound": NotFoundError,
    "InvalidInstanceStatus": ConflictError,
    "InstanceIdInUse": ConflictError,
    "InternalServerError": UnreachableError,
}


def find_nodes(cluster: str, region: str | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the nodes of a cluster with the given names, each node once. A name is an instance id, a logical id, a
    node name in Kubernetes (`hyperpod-i-...`) or a host name in Slurm.

    Raises:
        NotFoundError: the cluster has no node with one of the names.
    """
    known: dict[str, dict[str, Any]] = {}
    for node in nodes(cluster, region):
        host = str(node["host"] or "")
        for name in (node["id"], f"hyperpod-{node['id']}", node["logical_id"], host, host.partition(".")[0]):
            if name:
                known[str(name)] = node
    if missing := [name for name in names if name not in known]:
        hint = f"{suggest(missing[0], known)}; `hp-ext cluster nodes {cluster}` lists them"
        raise NotFoundError(f"{cluster} has no node {', '.join(missing)}", hint=hint)
    return list({str(known[name]["id"]): known[name] for name in names}.values())


def recovery_requests(cluster: str, found: Sequence[Mapping[str, Any]]) -> list[Request]:
    """Return the requests that reboot or replace the nodes `found`. Reboots and replacements have the same form of
    request, with at most MOST_IN_A_REQUEST nodes."""
    ids = [str(node["id"]) for node in found]
    starts = range(0, len(ids), MOST_IN_A_REQUEST)
    return [{"ClusterName": cluster, "NodeIds": ids[at : at + MOST_IN_A_REQUEST]} for at in starts]


def recover(action: Action, requests: Sequence[Request], region: str | None) -> Iterator[dict[str, Any]]:
    """Send the requests, and yield the result for each node: its `id`, whether AWS has `accepted` it, and for a refused
    node AWS's `code` and `message`."""
    service, operation = client("sagemaker", region), _OPERATIONS[action]
    send = service.batch_reboot_cluster_nodes if action == "reboot" else service.batch_replace_cluster_nodes
    for request in requests:
        answer = call(f"{operation} {request['ClusterName']}", partial(send, **request))
        for node in answer.get("Successful") or []:
            yield {"id": node, "accepted": True}
        for refused in answer.get("Failed") or []:
            code, message = refused.get("ErrorCode"), refused.get("Message")
            yield {"id": refused["NodeId"], "accepted": False, "code": code, "message": message}


def exit_code(outcomes: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code of the command: 0 if AWS has accepted every node, otherwise the code for the first refused
    node."""
    first = next((one for one in outcomes if not one["accepted"]), None)
    return 0 if first is None else _ERRORS.get(str(first["code"]), HyperpodExtError).exit_code
