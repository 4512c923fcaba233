"""The pod that runs one node of a job, as plain data. Pure: nothing of this machine goes in.

Nothing is privileged and nothing uses the node's network unless the spec asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.job.scheduling import NodeGroup
from hyperpod_ext.config.job.secret_variables import secrets_last
from hyperpod_ext.jobs.contract.efa import efa_environment
from hyperpod_ext.jobs.contract.yaml_text import literal
from hyperpod_ext.jobs.kubernetes.mounts import Mounts, job_mounts
from hyperpod_ext.jobs.kubernetes.own_words import both_affinities, with_limits
from hyperpod_ext.jobs.kubernetes.sizes import NodeShare, instance_type_of, node_share, spans_nodes

CONTAINER = "worker"
RUN_DIR = "/tmp/hyperpod-ext"
SECRET_KEY = "secret"
_GRACE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """How the container begins."""

    script: str
    """Shell, run by `/bin/sh -c`; it ends with exec, so that signals reach the launcher."""
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides the job's own; the job's win."""
    ports: tuple[int, ...] = ()
    keeps_addresses: bool = False
    """Whether the launcher writes into `labels.ADDRESSES_DIR`."""


def pod_template(
    job: JobConfig, start: Start, group: NodeGroup | None = None, name: str = CONTAINER, *, for_hyp: bool = False
) -> dict[str, Any]:
    """metadata and spec of the pods of `job`, or of one group of its nodes.

    Args:
        for_hyp: use only what the reader of AWS's `hyp` can parse. It stops listing a namespace at the first job with a
            pod anti-affinity that has a label selector, or with a secret volume that is not projected.
    """
    return {"metadata": pod_metadata(job), "spec": pod_spec(job, start, group, name, for_hyp)}


def object_labels(job: JobConfig) -> dict[str, str]:
    """Labels of the job itself and of all that belongs to it."""
    ours = {labels.MANAGED_BY: "hyperpod-ext", labels.JOB: job.name}
    return ours | queue_labels(job) | dict(job.labels)


def queue_labels(job: JobConfig) -> dict[str, str]:
    """How Kueue knows a job's queue and priority."""
    found = {labels.QUEUE: job.scheduling.queue, labels.PRIORITY: job.scheduling.priority}
    return {key: value for key, value in found.items() if value is not None}


def pod_metadata(job: JobConfig) -> dict[str, Any]:
    """Labels and annotations of every pod."""
    annotations = topology_annotations(job) | dict(job.annotations)
    return {"labels": object_labels(job)} | ({"annotations": annotations} if annotations else {})


def topology_annotations(job: JobConfig) -> dict[str, str]:
    """How Kueue knows which nodes are close enough."""
    topology = job.scheduling.topology
    if topology is None:
        return {}
    return {labels.TOPOLOGY_REQUIRED if topology.required else labels.TOPOLOGY_PREFERRED: topology.level}


def pod_spec(job: JobConfig, start: Start, group: NodeGroup | None, name: str, for_hyp: bool) -> dict[str, Any]:
    """The pod itself; empty parts are left out."""
    share = node_share(job, group)
    mounts = job_mounts(job, keeps_addresses=start.keeps_addresses, projected=for_hyp)
    only = job.kubernetes
    words = dict(only.pod)
    spec: dict[str, Any] = {
        "serviceAccountName": only.service_account,
        "automountServiceAccountToken": None if only.service_account else False,
        "hostNetwork": only.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if only.host_network else None,
        "terminationGracePeriodSeconds": only.termination_grace_s or grace_s(job),
        "priorityClassName": (group.pod_priority_class if group else None) or job.scheduling.pod_priority_class,
        "nodeSelector": node_selector(job, group),
        "affinity": both_affinities(words.pop("affinity", {}), affinity(job, apart=not for_hyp)),
        "topologySpreadConstraints": [
            *(one_pod_a_node(job) if for_hyp else ()),
            *words.pop("topologySpreadConstraints", []),
        ],
        "tolerations": tolerations(job, share),
        "imagePullSecrets": [{"name": secret} for secret in only.pull_secrets],
        "containers": [container(job, start, share, mounts, name), *words.pop("containers", [])],
        "volumes": [*mounts.volumes, *words.pop("volumes", [])],
    }
    return filled(spec) | words


def container(job: JobConfig, start: Start, share: NodeShare, mounts: Mounts, name: str) -> dict[str, Any]:
    """The container that trains."""
    only = job.kubernetes
    words = dict(only.container)
    resources = with_limits({"requests": share.requests(), "limits": share.limits()}, words.pop("resources", {}))
    may = {"privileged": True} if only.privileged else {"allowPrivilegeEscalation": False}
    own = filled(
        {
            "name": name,
            "image": start.image,
            "imagePullPolicy": only.pull_policy,
            "command": ["/bin/sh", "-c"],
            "args": [literal(start.script)],
            "workingDir": job.working_dir,
            "ports": [*({"containerPort": port} for port in start.ports), *words.pop("ports", [])],
            "env": [*environment(job, start, share), *words.pop("env", [])],
            "resources": filled(resources),
            "volumeMounts": [*mounts.mounts, *words.pop("volumeMounts", [])],
            "securityContext": may | words.pop("securityContext", {}),
        }
    )
    return own | words


def environment(job: JobConfig, start: Start, share: NodeShare) -> list[dict[str, Any]]:
    """Variables: what libraries need, then the launcher's, then the job's, which win; secrets by reference."""
    found: dict[str, str] = {}
    if share.efa and spans_nodes(job):
        found |= efa_environment(
            job.libraries, on_host=job.kubernetes.host_network, hugepages=bool(share.hugepages_mib)
        )
    found |= start.env
    found |= secrets_last(job.env)
    entries: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in found.items()]
    for entry in job.kubernetes.secret_env:
        reference = {"secretKeyRef": {"name": entry.secret, "key": entry.key}}
        entries.append({"name": entry.name, "valueFrom": reference})
    return entries


def runtime_environment(job: JobConfig) -> dict[str, str]:
    """What our runtime inside the container reads."""
    return {
        ENV_RUNTIME: RuntimeConfig.of(job).model_dump_json(),
        "HPX_RUN_DIR": RUN_DIR,
        "HPX_SECRET_FILE": f"{labels.SECRET_DIR}/{SECRET_KEY}",
    }


def agent_environment(job: JobConfig) -> dict[str, str]:
    """What our agent reads: besides, the file for its last word, where the pod names another one than usual."""
    file = job.kubernetes.container.get("terminationMessagePath")
    return runtime_environment(job) | ({"HPX_TERMINATION_LOG": file} if file is not None else {})


def node_selector(job: JobConfig, group: NodeGroup | None) -> dict[str, str]:
    """Labels that a node must have."""
    instance_type = instance_type_of(job, group)
    of_type = {labels.INSTANCE_TYPE: instance_type} if instance_type else {}
    return of_type | dict(job.scheduling.node_selector) | (dict(group.node_selector) if group else {})


def one_pod_a_node(job: JobConfig) -> list[dict[str, Any]]:
    """The constraint that keeps the job's pods apart, as the anti-affinity of `affinity` does.

    With as many domains asked for as the job has pods at most, a node without any counts as the least: one pod is then
    the most that a node may have.
    """
    if not (job.scheduling.spread and spans_nodes(job)):
        return []
    groups = [(group.max_nodes or group.nodes) + group.spares for group in job.node_groups]
    most = max(job.nodes, job.elastic.max_nodes if job.elastic else 0) + job.spares
    constraint = {
        "maxSkew": 1,
        "minDomains": max(most, sum(groups)),
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {labels.JOB: job.name}},
    }
    return [constraint]


def affinity(job: JobConfig, apart: bool = True) -> dict[str, Any]:
    """Away from nodes that HyperPod found faulty, and with `apart` from the job's other pods.

    `NotIn` also takes nodes without the label, so that it does no harm on other clusters.
    """
    found: dict[str, Any] = {}
    if job.scheduling.healthy_only:
        faulty = ["Unschedulable", "UnschedulablePendingReplacement", "UnschedulablePendingReboot"]
        expressions = [
            {"key": labels.NODE_HEALTH, "operator": "NotIn", "values": faulty},
            {"key": labels.DEEP_HEALTH, "operator": "NotIn", "values": ["Failed", "InProgress"]},
        ]
        required = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    if apart and job.scheduling.spread and spans_nodes(job):
        same_job = {"matchLabels": {labels.JOB: job.name}}
        term = {"labelSelector": same_job, "topologyKey": "kubernetes.io/hostname"}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return found


def tolerations(job: JobConfig, share: NodeShare) -> list[dict[str, Any]]:
    """Taints that the job puts up with: its own, and the usual one that guards accelerators."""
    found: list[dict[str, Any]] = []
    if guard := _guard_of(share.accelerator_resource):
        found.append({"key": guard, "operator": "Exists", "effect": "NoSchedule"})
    for asked in job.scheduling.tolerations:
        entry = {
            "key": asked.key,
            "operator": asked.operator,
            "value": asked.value,
            "effect": asked.effect,
            "tolerationSeconds": asked.seconds,
        }
        entry = {name: value for name, value in entry.items() if value is not None}
        if entry not in found:
            found.append(entry)
    return found


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that say nothing."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, ())}


def grace_s(job: JobConfig) -> int | None:
    """Seconds from SIGTERM to SIGKILL, if the newest step needs more than Kubernetes' 30 to reach a durable tier."""
    if job.mode != "ours" or not job.checkpoint.durable():
        return None
    needed = math.ceil(job.checkpoint.grace_s + _GRACE_MARGIN_S)
    return needed if needed > 30 else None


def _guard_of(resource: str | None) -> str | None:
    """The taint that clusters keep other pods from accelerators with."""
    if resource is None:
        return None
    return {"nvidia.com": "nvidia.com/gpu", "aws.amazon.com": "aws.amazon.com/neuron"}.get(resource.partition("/")[0])
