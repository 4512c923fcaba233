"""Renders the NetworkPolicy of a job's pods.

The policy is needed because hyperpodrun's agent accepts commands from every client that can connect to its port. Under
HyperPod's operator, pods of the same job may connect to each other on all ports except the agent's port.
"""

from __future__ import annotations

from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig

_LAST_PORT = 65535
_ALL_BUT_THE_AGENTS = (
    {"protocol": "TCP", "port": 1, "endPort": labels.AGENT_PORT - 1},
    {"protocol": "TCP", "port": labels.AGENT_PORT + 1, "endPort": _LAST_PORT},
    {"protocol": "UDP"},
)
"""Ports at which pods of a job accept connections from each other: all ports except the agent's. If the agent's port
were open, a compromised pod could stop the other pods."""


def network_policy(job: JobConfig, *, from_operator: bool) -> dict[str, Any]:
    """Return a policy that allows connections between pods of the job, and from any client to the port of `metrics`.

    Args:
        from_operator: allow only HyperPod's operator to connect to the agent's port.
    """
    members = {"matchLabels": {labels.JOB: job.name}}
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": members}]}]
    if from_operator:
        ingress[0]["ports"] = [dict(port) for port in _ALL_BUT_THE_AGENTS]
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": labels.OPERATOR_NAMESPACE}}
        ports = [{"protocol": "TCP", "port": labels.AGENT_PORT}]
        ingress.append({"from": [{"namespaceSelector": namespace}], "ports": ports})
    if job.metrics is not None and job.metrics.port and job.has_agent:
        ingress.append({"ports": [{"protocol": "TCP", "port": job.metrics.port}]})
    metadata: dict[str, Any] = {"name": f"{job.name}-hpx"}
    if job.kubernetes.namespace:
        metadata["namespace"] = job.kubernetes.namespace
    metadata["labels"] = {labels.MANAGED_BY: "hyperpod-ext", labels.JOB: job.name}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": members, "policyTypes": ["Ingress"], "ingress": ingress},
    }
