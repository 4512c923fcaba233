"""Rules of sections `kubernetes.container` and `kubernetes.pod`: missing names, contradictions, and fields that the job
itself relies on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.secret_files import hides_secret, unread_secret
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks, refusal
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, PYTORCH, TRAIN
from hyperpod_ext.jobs.kubernetes.mounts import is_own_name
from hyperpod_ext.jobs.kubernetes.pod import grace_s
from hyperpod_ext.jobs.kubernetes.sizes import node_share, size_of
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule
from hyperpod_ext.jobs.rules.pod_parts import contradictions

_CONTAINER: Path = ("kubernetes", "container")
_POD: Path = ("kubernetes", "pod")
_WRITES = "/tmp"
"""Folder in which the launcher and this project's runtime write logs, sockets and state."""
_WITH_LIMITS = ("cpu", "memory", "ephemeral-storage")
_FROM_RESOURCES = (labels.EFA, "nvidia.com/gpu", "aws.amazon.com/neuron", "aws.amazon.com/neurondevice")
_GRACE_S = 30
"""Kubernetes' default seconds from SIGTERM to SIGKILL when a pod is deleted."""


@rule(
    "HPX155",
    "error",
    "a pod refers to a volume or claim that it does not have",
    "Kubernetes refuses a pod whose containers mount volumes, or use claims, that the pod does not have.",
    "Add the volume or claim to kubernetes.pod, or correct the name.",
    reads=("kubernetes.container", "kubernetes.pod"),
)
def what_is_named_is_there(context: Context) -> Iterator[Finding]:
    pod = context.job.kubernetes.pod
    volumes, claims = ({one["name"] for one in pod.get(field, ())} for field in ("volumes", "resourceClaims"))
    for path, container in _containers(context.job):
        for field in ("volumeMounts", "volumeDevices"):
            for index, one in enumerate(container.get(field, ())):
                if (name := one["name"]) not in volumes:
                    at = (*path, field, index, "name")
                    yield Finding(at, f"there is no volume `{name}`", "add it to kubernetes.pod.volumes")
        for index, claim in enumerate(container.get("resources", {}).get("claims", ())):
            if (name := claim["name"]) not in claims:
                at = (*path, "resources", "claims", index, "name")
                yield Finding(at, f"there is no claim `{name}`", "add it to kubernetes.pod.resourceClaims")


@rule(
    "HPX156",
    "error",
    "a pod that hides or changes something the job needs",
    "The launcher identifies ranks by variables, reads the job's secret from a volume, and writes below /tmp; "
    "scripts read secret volumes.",
    "Remove the field, or write what the hint says.",
    reads=("kubernetes.container", "kubernetes.pod", "overlay.kubernetes.pod", "mode", "volumes"),
)
def promises_are_kept(context: Context) -> Iterator[Finding]:
    job, own, pod = context.job, context.job.kubernetes.container, context.job.kubernetes.pod
    for index, variable in enumerate(own.get("env", ())):
        if is_of_ranks(name := variable["name"]):
            yield Finding((*_CONTAINER, "env", index, "name"), refusal(name), "choose another name")
    for index, volume in enumerate(pod.get("volumes", ())):
        if is_own_name(job, name := volume["name"]):
            message = f"`{name}` is the name of one of the job's own volumes"
            yield Finding((*_POD, "volumes", index, "name"), message, "choose another name")
    mounted = [one["mountPath"] for one in own.get("volumeMounts", ())]
    for index, place in enumerate(mounted):
        if job.has_agent and hides_secret(place):
            at = (*_CONTAINER, "volumeMounts", index, "mountPath")
            yield Finding(at, "would hide the job's secret", "choose another mountPath")
    read_only = own.get("securityContext", {}).get("readOnlyRootFilesystem")
    if read_only and _WRITES not in (*mounted, *(one.path for one in job.volumes)):
        message = f"the launcher writes below {_WRITES}, which would be read-only"
        hint = "add `{kind: scratch, path: /tmp}` to volumes"
        yield Finding((*_CONTAINER, "securityContext", "readOnlyRootFilesystem"), message, hint)
    yield from _unread_secret(job)


@rule(
    "HPX157",
    "error",
    "fields of a pod that exclude each other",
    "The API server or the node refuses such a pod after submission, or the pod never starts.",
    "Remove one of the two fields.",
    reads=("kubernetes.container", "kubernetes.pod", "kubernetes.host_network", "kubernetes.privileged"),
)
def fields_go_together(context: Context) -> Iterator[Finding]:
    yield from contradictions(context.job)
    yield from _of_security(context.job)
    for path, container in _containers(context.job):
        yield from _of_node(context.job, path, container)


@rule(
    "HPX158",
    "error",
    "a name or port that the job itself uses",
    "Commands and the operator find the training container by its name, and the operator connects to its port.",
    "Choose another name or port.",
)
def names_and_ports_are_apart(context: Context) -> Iterator[Finding]:
    reserved = {kind.container for kind in (HYPERPOD, PYTORCH, TRAIN) if context.may_be(kind.target)}
    for path, side in _side_containers(context.job):
        if side["name"] in reserved:
            message = f"the training container already has the name `{side['name']}`, by which the operator finds it"
            yield Finding((*path, "name"), message, "choose another name")
    seen = {labels.AGENT_PORT: "reserved for the operator"} if context.target == HYPERPOD.target else {}
    for path, container in _containers(context.job):
        for index, one in enumerate(container.get("ports", ())):
            port = one["containerPort"]
            if one.get("protocol", "TCP") != "TCP":
                continue
            if port in seen:
                at = (*path, "ports", index, "containerPort")
                yield Finding(at, f"port {port} is {seen[port]}", "choose another port")
            seen.setdefault(port, "already used in the pod")


@rule(
    "HPX159",
    "error",
    "a number outside the pod's limits",
    "The API server refuses a limit below the request, and a pause longer than the pod's grace period.",
    "Correct the number, or the field that limits it.",
    targets=KUBERNETES,
)
def amounts_fit(context: Context) -> Iterator[Finding]:
    yield from _limits(context.job)
    yield from _pause(context.job)


def _containers(job: JobConfig) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the training container and the side containers, each with its path in the spec."""
    yield _CONTAINER, job.kubernetes.container
    yield from _side_containers(job)


def _side_containers(job: JobConfig) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for field in ("initContainers", "containers"):
        for index, one in enumerate(job.kubernetes.pod.get(field, ())):
            yield (*_POD, field, index), one


def _of_security(job: JobConfig) -> Iterator[Finding]:
    """Yield a finding for each contradiction between security settings of training container, pod and job."""
    only, pod = job.kubernetes, job.kubernetes.pod
    may, above = (one.get("securityContext", {}) for one in (only.container, pod))
    at = (*_CONTAINER, "securityContext")
    if only.privileged and may.get("allowPrivilegeEscalation") is False:
        hint = "remove this field, or kubernetes.privileged"
        yield Finding((*at, "allowPrivilegeEscalation"), "cannot be false in a privileged container", hint)
    if may.get("procMount") == "Unmasked" and pod.get("hostUsers") is not False:
        hint = "add kubernetes.pod.hostUsers: false"
        yield Finding((*at, "procMount"), "`Unmasked` needs hostUsers: false", hint)
    if may.get("runAsNonRoot") and "runAsUser" not in may and above.get("runAsUser") == 0:
        hint = "set runAsUser in the container"
        yield Finding((*at, "runAsNonRoot"), "the pod's runAsUser is 0, which is root", hint)
    if only.host_network and pod.get("hostUsers") is False:
        yield Finding((*_POD, "hostUsers"), "`false` excludes kubernetes.host_network", "remove one of the two fields")
    for index, setting in enumerate(above.get("sysctls", ())):
        if only.host_network and setting["name"].replace("/", ".").startswith("net."):
            place = (*_POD, "securityContext", "sysctls", index, "name")
            message = f"`{setting['name']}` would change the node's network, because kubernetes.host_network is set"
            yield Finding(place, message, "remove the setting, or kubernetes.host_network")


def _of_node(job: JobConfig, path: Path, container: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield problems of a container's mounts that propagate to the node, and of its ports on the node's network.

    Args:
        path: path of the container in the spec.
    """
    only, may = job.kubernetes, container.get("securityContext", {})
    privileged = only.privileged if path == _CONTAINER else may.get("privileged")
    for index, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("mountPropagation") == "Bidirectional" and not privileged:
            at = (*path, "volumeMounts", index, "mountPropagation")
            field = "kubernetes.privileged" if path == _CONTAINER else "securityContext.privileged"
            hint = f"write HostToContainer, or set {field}"
            yield Finding(at, "`Bidirectional` needs a privileged container", hint)
    for index, one in enumerate(container.get("ports", ())):
        port = one["containerPort"]
        if only.host_network and one.get("hostPort", port) != port:
            message = f"must be equal to containerPort {port}, because kubernetes.host_network is set"
            yield Finding((*path, "ports", index, "hostPort"), message, f"remove it, or write {port}")


def _unread_secret(job: JobConfig) -> Iterator[Finding]:
    """Report a `runAsUser` of the spec with which the container's processes cannot read a secret."""
    own, above = (one.get("securityContext", {}) for one in (job.kubernetes.container, job.kubernetes.pod))
    overlaid = job.overlay.kubernetes.pod.get("securityContext")
    group = overlaid.get("fsGroup") if isinstance(overlaid, dict) else None
    if found := unread_secret(job, own, above, above.get("fsGroup") if group is None else group):
        part, field, message, add = found
        hint = f"set kubernetes.pod.securityContext.fsGroup: {add}, for example"
        yield Finding(("kubernetes", part, "securityContext", field), message, hint)


def _limits(job: JobConfig) -> Iterator[Finding]:
    """Yield a finding for each limit below its request, and for each limit that must be set in `resources` instead."""
    groups = job.node_groups or (None,)
    for name, most in job.kubernetes.container.get("resources", {}).get("limits", {}).items():
        path = (*_CONTAINER, "resources", "limits", name)
        for group in groups:
            share = node_share(job, group)
            if name in share.limits() or name in _FROM_RESOURCES or name.startswith("hugepages-"):
                huge = "hugepages_mib" if name.startswith("hugepages-") else "accelerators"
                hint = f"remove it, and write resources.{'efa' if name == labels.EFA else huge}"
                yield Finding(path, "is set from `resources`", hint)
                break
            least = share.requests().get(name)
            if least is not None and size_of(least) > size_of(most):
                yield Finding(path, f"is less than the {least} that `resources` requests", f"write at least {least}")
                break
            if name not in _WITH_LIMITS and "/" not in name:
                hint = f"write {', '.join(_WITH_LIMITS)}, or a name with a slash, such as `example.com/thing`"
                yield Finding(path, "is not a known resource", hint)
                break


def _pause(job: JobConfig) -> Iterator[Finding]:
    pause = job.kubernetes.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    grace = job.kubernetes.termination_grace_s or grace_s(job) or _GRACE_S
    if pause > grace:
        at = (*_CONTAINER, "lifecycle", "preStop", "sleep", "seconds")
        yield Finding(
            at,
            f"{pause} s is longer than the pod's grace period of {grace} s",
            "write less, or raise kubernetes.termination_grace_s",
        )
