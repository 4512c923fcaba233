"""Renders the pod of one node of a job as plain data. Pure.

Pods are unprivileged and do not use the node's network, unless the spec requests it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.resources import Libraries
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.job.scheduling import NodeGroup
from hyperpod_ext.config.job.secret_variables import secrets_last
from hyperpod_ext.jobs.contract.spec_annotation import note_of
from hyperpod_ext.jobs.contract.yaml_text import literal
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, Kind
from hyperpod_ext.jobs.kubernetes.mounts import Mounts, job_mounts
from hyperpod_ext.jobs.kubernetes.sizes import NodeShare, instance_type_of, node_share, spans_nodes

RUN_DIR = "/tmp/hyperpod-ext"
SECRET_KEY = "secret"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
"""Field of an affinity that has the conditions that a node must meet."""
_GRACE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """Script, image, environment and ports with which the training container starts."""

    script: str
    """Script for `/bin/sh -c`. The script ends with exec, so that signals reach the launcher."""
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the launcher, which variables in the spec's `env` override."""
    ports: tuple[int, ...] = ()
    keeps_addresses: bool = False
    """Whether the launcher writes its pod's addresses to the folder `labels.ADDRESSES_DIR`."""


def pod_template(job: JobConfig, start: Start, kind: Kind, group: NodeGroup | None = None) -> dict[str, Any]:
    """Return metadata and spec of the pods of `job`.

    Args:
        group: group of nodes to which the pods belong; None if the job has no groups.
    """
    return {"metadata": pod_metadata(job), "spec": pod_spec(job, start, kind, group)}


def object_labels(job: JobConfig) -> dict[str, str]:
    """Return the labels of the job's object and of its pods."""
    ours = {labels.MANAGED_BY: "hyperpod-ext", labels.JOB: job.name}
    return ours | queue_labels(job) | dict(job.labels)


def job_metadata(job: JobConfig, annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of the job's object: name, namespace, labels and annotations.

    Args:
        annotations: annotations to add to the annotations in the spec.
    """
    return filled(
        {
            "name": job.name,
            "namespace": job.kubernetes.namespace,
            "labels": object_labels(job),
            "annotations": dict(annotations) | dict(job.annotations) | note_of(job),
        }
    )


def queue_labels(job: JobConfig) -> dict[str, str]:
    """Return the labels by which Kueue reads the job's queue and priority."""
    found = {labels.QUEUE: job.scheduling.queue, labels.PRIORITY: job.scheduling.priority}
    return {key: value for key, value in found.items() if value is not None}


def pod_metadata(job: JobConfig) -> dict[str, Any]:
    """Return the metadata of every pod: labels and annotations."""
    annotations = topology_annotations(job) | dict(job.annotations)
    return {"labels": object_labels(job)} | ({"annotations": annotations} if annotations else {})


def topology_annotations(job: JobConfig) -> dict[str, str]:
    """Return the annotation by which Kueue reads the job's topology; {} without scheduling.topology."""
    topology = job.scheduling.topology
    if topology is None:
        return {}
    return {labels.TOPOLOGY_REQUIRED if topology.required else labels.TOPOLOGY_PREFERRED: topology.level}


def pod_spec(job: JobConfig, start: Start, kind: Kind, group: NodeGroup | None) -> dict[str, Any]:
    """Return the spec of a pod without empty fields.

    Pods of a HyperPodPyTorchJob get only fields that AWS's command `hyp` can parse. A job whose pods have an
    anti-affinity with a label selector, or a secret volume that is not projected, would make `hyp list` fail for the
    whole namespace.

    Args:
        group: group of nodes to which the pod belongs; None if the job has no groups.
    """
    for_hyp = kind is HYPERPOD
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
        "containers": [container(job, start, share, mounts, kind.container), *words.pop("containers", [])],
        "volumes": [*mounts.volumes, *words.pop("volumes", [])],
    }
    return filled(spec) | words


def container(job: JobConfig, start: Start, share: NodeShare, mounts: Mounts, name: str) -> dict[str, Any]:
    """Return the training container of a pod.

    Args:
        start: script, image, environment and ports of the container.
        share: resource requests of the pod.
        name: name of the container.
    """
    only = job.kubernetes
    words = dict(only.container)
    limited = words.pop("resources", {})
    limits = share.limits() | limited.get("limits", {})
    resources = {"requests": share.requests(), "limits": limits, "claims": limited.get("claims")}
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
    """Return the container's environment variables.

    The result has the variables of EFA's libraries, of the launcher, and of the spec's `env`, in this order. If a name
    is repeated, only the last value is used. The variables with values from Secrets are last.
    """
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


def efa_environment(libraries: Libraries, *, on_host: bool, hugepages: bool) -> dict[str, str]:
    """Return the environment variables of a job whose nodes communicate over EFA.

    RDMAV_FORK_SAFE is not set, because it is harmful with current libfabric.

    Args:
        libraries: versions of the libraries in the image.
        on_host: whether the workers use the node's network instead of a pod's network.
        hugepages: whether huge pages are reserved for EFA. Without reserved huge pages, EFA is configured not to use
            huge pages, because a process that uses huge pages could not fork.
    """
    variables: dict[str, str] = {}
    if not hugepages:
        variables["FI_EFA_USE_HUGE_PAGE"] = "0"
    if _older(libraries.libfabric, (1, 18)) or _older(libraries.ofi_nccl, (1, 6)):
        variables["FI_PROVIDER"] = "efa"
    if _older(libraries.ofi_nccl, (1, 6)):
        variables["NCCL_PROTO"] = "simple"
    if _older(libraries.ofi_nccl, (1, 7)):
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    # A pod communicates over eth0. On the node's network, exclude interfaces without a route to other nodes.
    variables["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth,eth" if on_host else "^lo"
    return variables


def _older(version: str | None, than: tuple[int, int]) -> bool:
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) < than


def runtime_environment(job: JobConfig) -> dict[str, str]:
    """Return the environment variables that configure this project's runtime."""
    return {
        ENV_RUNTIME: RuntimeConfig.of(job).model_dump_json(),
        "HPX_RUN_DIR": RUN_DIR,
        "HPX_SECRET_FILE": f"{labels.SECRET_DIR}/{SECRET_KEY}",
    }


def agent_environment(job: JobConfig) -> dict[str, str]:
    """Return the environment variables that configure this project's agent.

    The result includes the variables of `runtime_environment`. If the spec sets the path of the container's termination
    message, the result has the path, too.
    """
    file = job.kubernetes.container.get("terminationMessagePath")
    return runtime_environment(job) | ({"HPX_TERMINATION_LOG": file} if file is not None else {})


def node_selector(job: JobConfig, group: NodeGroup | None) -> dict[str, str]:
    """Return the labels that a node must have to run the job's pods.

    Args:
        group: group of nodes to which the pods belong; None if the job has no groups.
    """
    instance_type = instance_type_of(job, group)
    of_type = {labels.INSTANCE_TYPE: instance_type} if instance_type else {}
    return of_type | dict(job.scheduling.node_selector) | (dict(group.node_selector) if group else {})


def one_pod_a_node(job: JobConfig) -> list[dict[str, Any]]:
    """Return the topology spread constraint that places each pod of the job on a node of its own.

    `minDomains` is the largest number of pods of the job. With fewer nodes than `minDomains`, Kubernetes counts zero
    pods for a missing node. Together, `minDomains` and `maxSkew: 1` limit each node to one pod of the job.
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
    """Return the pod's affinity, which avoids nodes that HyperPod has labelled as faulty.

    Conditions use the operator `NotIn`, which also accepts nodes without HyperPod's labels.

    Args:
        apart: also avoid nodes that run another pod of the job.
    """
    found: dict[str, Any] = {}
    if job.scheduling.healthy_only:
        faulty = ["Unschedulable", "UnschedulablePendingReplacement", "UnschedulablePendingReboot"]
        expressions = [
            {"key": labels.NODE_HEALTH, "operator": "NotIn", "values": faulty},
            {"key": labels.DEEP_HEALTH, "operator": "NotIn", "values": ["Failed", "InProgress"]},
        ]
        required = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
        found["nodeAffinity"] = {REQUIRED: required}
    if apart and job.scheduling.spread and spans_nodes(job):
        same_job = {"matchLabels": {labels.JOB: job.name}}
        term = {"labelSelector": same_job, "topologyKey": "kubernetes.io/hostname"}
        found["podAntiAffinity"] = {REQUIRED: [term]}
    return found


def both_affinities(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the affinity in the spec (`theirs`) with the affinity that hp-ext adds (`ours`).

    The terms of a node affinity are alternatives, so hp-ext's conditions are added to each term. The pod
    anti-affinities of hp-ext are added to the pod anti-affinities of the spec.
    """
    found = copy.deepcopy(dict(theirs))
    if needed := ours.get("nodeAffinity"):
        (own,) = needed[REQUIRED]["nodeSelectorTerms"]
        nodes = found.setdefault("nodeAffinity", {})
        terms = nodes[REQUIRED]["nodeSelectorTerms"] if REQUIRED in nodes else [{}]
        expressions = [[*term.get("matchExpressions", []), *own["matchExpressions"]] for term in terms]
        both = [term | {"matchExpressions": one} for term, one in zip(terms, expressions, strict=True)]
        nodes[REQUIRED] = {"nodeSelectorTerms": both}
    if apart := ours.get("podAntiAffinity"):
        others = found.setdefault("podAntiAffinity", {})
        others[REQUIRED] = [*others.get(REQUIRED, []), *apart[REQUIRED]]
    return found


def tolerations(job: JobConfig, share: NodeShare) -> list[dict[str, Any]]:
    """Return the tolerations of the spec, and a toleration for the usual taint of nodes with accelerators."""
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
    """Return `fields` without fields whose value is None or empty."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, ())}


def grace_s(job: JobConfig) -> int | None:
    """Return the seconds from SIGTERM to SIGKILL that the job needs for its final save.

    Returns None if the job has no final save, or Kubernetes' default of 30 seconds is enough.
    """
    if job.mode != "ours" or not job.checkpoint.durable():
        return None
    needed = math.ceil(job.checkpoint.grace_s + _GRACE_MARGIN_S)
    return needed if needed > 30 else None


def _guard_of(resource: str | None) -> str | None:
    """Return the key of the usual taint of nodes with the accelerator `resource`, such as `nvidia.com/gpu`."""
    if resource is None:
        return None
    return {"nvidia.com": "nvidia.com/gpu", "aws.amazon.com": "aws.amazon.com/neuron"}.get(resource.partition("/")[0])
