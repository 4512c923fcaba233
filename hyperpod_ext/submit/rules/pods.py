"""Pods in Kubernetes' own words: what they name, what does not go together, and what a job relies on."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.pods.containers import SideContainer, TrainingContainer
from hyperpod_ext.config.job.pods.words import size_of
from hyperpod_ext.submit.contract.rank_variables import is_of_ranks
from hyperpod_ext.submit.kubernetes.mounts import own_names
from hyperpod_ext.submit.kubernetes.own_words import written
from hyperpod_ext.submit.kubernetes.pod import grace_s
from hyperpod_ext.submit.kubernetes.sizes import node_share
from hyperpod_ext.submit.rules import KUBERNETES, Context, rule

_CONTAINER: Path = ("kubernetes", "container")
_POD: Path = ("kubernetes", "pod")
_EKS = "hyperpod-eks"
_TRAINING = {_EKS: ("worker",), "kubeflow": ("pytorch", "node")}
"""Names of the container that trains."""
_OF_TRAINJOB = {
    *(f"kubernetes.container.{name}" for name in ("env", "resources", "securityContext", "volumeMounts")),
    *(f"kubernetes.pod.{name}" for name in ("affinity", "schedulingGates", "securityContext", "volumes")),
}
"""What a TrainJob may change of its runtime's pods, of what is said in Kubernetes' own words."""
_WRITES = "/tmp"
"""Where launchers and our runtime write: logs, sockets, the state of a run."""
_WITH_LIMITS = ("cpu", "memory", "ephemeral-storage")
_FROM_RESOURCES = (labels.EFA, "nvidia.com/gpu", "aws.amazon.com/neuron", "aws.amazon.com/neurondevice")
_GRACE_S = 30
"""Kubernetes' own, from SIGTERM to SIGKILL."""


@rule(
    "HPX155",
    "error",
    "a pod names what it does not have",
    "Kubernetes refuses a pod whose containers mount volumes, or use claims, that the pod does not have.",
    "Add it to kubernetes.pod, or correct the name.",
    reads=("kubernetes.container", "kubernetes.pod"),
)
def what_is_named_is_there(context: Context) -> Iterator[Finding]:
    pod = context.job.kubernetes.pod
    volumes = {one.name for one in pod.volumes}
    claims = {one.name for one in pod.resourceClaims}
    for path, container in _containers(context.job):
        for index, mount in enumerate(container.volumeMounts):
            if mount.name not in volumes:
                at = (*path, "volumeMounts", index, "name")
                yield Finding(at, f"there is no volume `{mount.name}`", "add it to kubernetes.pod.volumes")
        for index, device in enumerate(container.volumeDevices):
            if device.name not in volumes:
                at = (*path, "volumeDevices", index, "name")
                yield Finding(at, f"there is no volume `{device.name}`", "add it to kubernetes.pod.volumes")
        used = container.resources.claims if container.resources is not None else ()
        for index, claim in enumerate(used):
            if claim.name not in claims:
                at = (*path, "resources", "claims", index, "name")
                yield Finding(at, f"there is no claim `{claim.name}`", "add it to kubernetes.pod.resourceClaims")


@rule(
    "HPX156",
    "error",
    "a pod without what the job relies on",
    "The launcher tells ranks who they are by variables, reads the job's secret from a volume, and writes below /tmp.",
    "Remove the field, or write what the hint says.",
    reads=("kubernetes.container", "kubernetes.pod", "overlay.kubernetes.pod", "mode", "volumes"),
)
def promises_are_kept(context: Context) -> Iterator[Finding]:
    job, only = context.job, context.job.kubernetes
    for index, variable in enumerate(only.container.env):
        if is_of_ranks(variable.name):
            message = f"{variable.name} is set by the launcher: ranks know by it who they are"
            yield Finding((*_CONTAINER, "env", index, "name"), message, "choose another name")
    ours = own_names(job)
    for index, volume in enumerate(only.pod.volumes):
        if volume.name in ours:
            message = f"`{volume.name}` is a volume that the job itself has"
            yield Finding((*_POD, "volumes", index, "name"), message, "choose another name")
    for index, mount in enumerate(only.container.volumeMounts):
        if job.mode == "ours" and _is_below(labels.SECRET_DIR, mount.mountPath):
            at = (*_CONTAINER, "volumeMounts", index, "mountPath")
            yield Finding(at, "would hide the job's secret", "mount it elsewhere")
    may = only.container.securityContext
    places = [*(one.path for one in job.volumes), *(one.mountPath for one in only.container.volumeMounts)]
    if may is not None and may.readOnlyRootFilesystem and _WRITES not in places:
        message = f"the launcher writes below {_WRITES}, which nothing can then"
        hint = "add `{kind: scratch, path: /tmp}` to volumes"
        yield Finding((*_CONTAINER, "securityContext", "readOnlyRootFilesystem"), message, hint)
    yield from _unread_secret(job)


@rule(
    "HPX157",
    "error",
    "fields of a pod that do not go together",
    "The API server or the node refuses such a pod once the job is submitted; some never start.",
    "Remove one of the two.",
    reads=("kubernetes.container", "kubernetes.pod", "kubernetes.host_network", "kubernetes.privileged"),
)
def fields_go_together(context: Context) -> Iterator[Finding]:
    job, only, pod = context.job, context.job.kubernetes, context.job.kubernetes.pod
    may = only.container.securityContext
    if only.privileged and may is not None and may.allowPrivilegeEscalation is False:
        at = (*_CONTAINER, "securityContext", "allowPrivilegeEscalation")
        yield Finding(at, "a privileged container may escalate", "remove it, or kubernetes.privileged")
    if may is not None and may.procMount == "Unmasked" and pod.hostUsers is not False:
        at = (*_CONTAINER, "securityContext", "procMount")
        yield Finding(at, "`Unmasked` goes with users of the pod's own", "add kubernetes.pod.hostUsers: false")
    nobody = may is not None and may.runAsNonRoot and may.runAsUser is None
    if nobody and pod.securityContext is not None and pod.securityContext.runAsUser == 0:
        at = (*_CONTAINER, "securityContext", "runAsNonRoot")
        yield Finding(at, "the pod's runAsUser is 0, which is root", "give the container a runAsUser of its own")
    if only.host_network and pod.hostUsers is False:
        yield Finding((*_POD, "hostUsers"), "`false` does not go with the node's network", "remove it, or host_network")
    settings = pod.securityContext.sysctls if pod.securityContext is not None else ()
    for index, setting in enumerate(settings):
        if only.host_network and setting.name.replace("/", ".").startswith("net."):
            at = (*_POD, "securityContext", "sysctls", index, "name")
            yield Finding(at, "the node's network keeps its own settings", "remove it, or kubernetes.host_network")
    for path, container in _containers(job):
        privileged = (
            only.privileged if path == _CONTAINER else bool(getattr(container.securityContext, "privileged", 0))
        )
        for index, mount in enumerate(container.volumeMounts):
            if mount.mountPropagation == "Bidirectional" and not privileged:
                at = (*path, "volumeMounts", index, "mountPropagation")
                yield Finding(at, "`Bidirectional` needs a privileged container", "write HostToContainer")
        for index, port in enumerate(container.ports):
            if only.host_network and port.hostPort not in (None, port.containerPort):
                at = (*path, "ports", index, "hostPort")
                message = f"on the node's network port {port.containerPort} is that of the node"
                yield Finding(at, message, f"remove it, or write {port.containerPort}")


@rule(
    "HPX158",
    "error",
    "a name or port that the job itself has",
    "Commands and the operator find the container that trains by its name, and the operator reaches it at its port.",
    "Choose another.",
)
def names_and_ports_are_apart(context: Context) -> Iterator[Finding]:
    reserved = {name for target, names in _TRAINING.items() if context.may_be(target) for name in names}
    for path, side in _side_containers(context.job):
        if side.name in reserved:
            message = "the container that trains is called so: commands and the operator find it by its name"
            yield Finding((*path, "name"), message, "choose another name")
    seen = {labels.AGENT_PORT: "the job's own: the operator reaches it there"} if context.target == _EKS else {}
    for path, container in _containers(context.job):
        for index, port in enumerate(container.ports):
            if port.protocol in (None, "TCP") and port.containerPort in seen:
                message = f"{port.containerPort} is {seen[port.containerPort]}"
                yield Finding((*path, "ports", index, "containerPort"), message, "choose another port")
            if port.protocol in (None, "TCP"):
                seen.setdefault(port.containerPort, "a port of the pod already")


@rule(
    "HPX159",
    "error",
    "more, or less, than the pod has",
    "A limit below the request, and a pause longer than a pod has to end, are refused by the API server.",
    "Correct the number, or what it is compared with.",
)
def amounts_fit(context: Context) -> Iterator[Finding]:
    if context.may_be(*KUBERNETES):
        yield from _limits(context.job)
        yield from _pause(context.job)


@rule(
    "HPX154",
    "error",
    "a TrainJob cannot say this",
    "What a TrainJob may change of its runtime's pods is limited; these settings belong into the TrainingRuntime.",
    "Set them in a TrainingRuntime of your own and name it in kubernetes.training_runtime, or use a PyTorchJob.",
)
def trainjob_has_no_field(context: Context) -> Iterator[Finding]:
    job, only = context.job, context.job.kubernetes
    if context.target != "kubeflow" or only.kubeflow_api != "trainjob":
        return
    asked = {
        ("kubernetes", "host_network"): only.host_network,
        ("kubernetes", "pull_policy"): only.pull_policy,
        ("scheduling", "pod_priority_class"): job.scheduling.pod_priority_class,
        ("timeouts", "keep_s"): job.timeouts.keep_s,
        ("kubernetes", "container", "resources", "claims"): only.container.resources
        and only.container.resources.claims,
    }
    found = [path for path, value in asked.items() if value]
    found += [tuple(path.split(".")) for path in written(job) if path not in _OF_TRAINJOB]
    for path in found:
        yield Finding(path, "is not among what a TrainJob may change", "set it in the TrainingRuntime")


def _containers(job: JobConfig) -> Iterator[tuple[Path, TrainingContainer | SideContainer]]:
    """The container that trains, and those beside it."""
    yield _CONTAINER, job.kubernetes.container
    yield from _side_containers(job)


def _side_containers(job: JobConfig) -> Iterator[tuple[Path, SideContainer]]:
    for field in ("initContainers", "containers"):
        for index, one in enumerate(getattr(job.kubernetes.pod, field)):
            yield (*_POD, field, index), one


def _is_below(place: str, above: str) -> bool:
    """Whether a mount at `above` hides what is at `place`."""
    return f"{place}/".startswith(f"{above.rstrip('/')}/")


def _unread_secret(job: JobConfig) -> Iterator[Finding]:
    """A user besides root who would not be let near the job's secret, which is of root and of the pod's group."""
    own, above = job.kubernetes.container.securityContext, job.kubernetes.pod.securityContext
    overlaid = job.overlay.kubernetes.pod.get("securityContext")
    group = (above.fsGroup if above is not None else None) or (isinstance(overlaid, dict) and overlaid.get("fsGroup"))
    if job.mode != "ours" or group:
        return
    found: list[tuple[Path, int | None, bool | None]] = [
        (path, one.runAsUser, one.runAsNonRoot) for path, one in ((_CONTAINER, own), (_POD, above)) if one is not None
    ]
    for path, user, nonroot in found:
        field = "runAsUser" if user else "runAsNonRoot"
        if user or (nonroot and not user):
            who = f"user {user}" if user else "a user besides root"
            hint = f"add kubernetes.pod.securityContext.fsGroup, {user or 1000} for example"
            message = f"{who} cannot read the job's secret without a group of the pod"
            yield Finding((*path, "securityContext", field), message, hint)
            return


def _limits(job: JobConfig) -> Iterator[Finding]:
    """Limits below what `resources` asks for, and limits of what it has fields for."""
    asked = job.kubernetes.container.resources
    if asked is None:
        return
    groups = job.node_groups or (None,)
    for name, most in asked.limits.items():
        path = (*_CONTAINER, "resources", "limits", name)
        for group in groups:
            share = node_share(job, group)
            if name in share.limits() or name in _FROM_RESOURCES or name.startswith("hugepages-"):
                hint = "write resources.accelerators, resources.efa or resources.hugepages_mib"
                yield Finding(path, "follows from `resources`, which has fields for it", hint)
                break
            least = share.requests().get(name)
            if least is not None and size_of(least) > size_of(most):
                yield Finding(path, f"is less than the {least} that `resources` asks for", f"write at least {least}")
                break
            if name not in _WITH_LIMITS and "/" not in name:
                message = "is no resource of Kubernetes, and resources of others have names with a slash"
                yield Finding(path, message, f"write {', '.join(_WITH_LIMITS)}, or `example.com/thing`")
                break


def _pause(job: JobConfig) -> Iterator[Finding]:
    life = job.kubernetes.container.lifecycle
    pause = life.preStop.sleep if life is not None and life.preStop is not None else None
    grace = job.kubernetes.termination_grace_s or grace_s(job) or _GRACE_S
    if pause is not None and pause.seconds > grace:
        at = (*_CONTAINER, "lifecycle", "preStop", "sleep", "seconds")
        yield Finding(at, f"the pod has {grace} s to end", "write less, or more as kubernetes.termination_grace_s")


@rule(
    "HPX175",
    "warning",
    "a job that AWS's `hyp` cannot read",
    "sagemaker-hyperpod (3.12.0) reads all jobs of a namespace and stops at the first that has one of these fields: "
    "`hyp list` and `hyp get` then fail for everybody there. The operator itself takes them.",
    "Leave the field out if others in the namespace use `hyp`: whole numbers as thresholds, `scheduling.spread` in "
    "place of rules about pods, `volumes` of kind secret in place of a secret by name.",
)
def hyp_can_read_it(context: Context) -> Iterator[Finding]:
    if context.target != _EKS:
        return
    hint = "leave it out if others in the namespace use `hyp`"
    message = "AWS's `hyp` cannot read it, and then lists no job of the namespace"
    for index, one in enumerate(context.job.log_rules):
        path = ("log_rules", index)
        if one.fault_on_match:
            yield Finding((*path, "fault_on_match"), message, hint)
        if one.threshold is not None and one.threshold != int(one.threshold):
            yield Finding((*path, "threshold"), message, "write a whole number, or leave it out")
    rules = context.job.kubernetes.pod.affinity
    for field in ("podAffinity", "podAntiAffinity"):
        if rules is not None and getattr(rules, field) is not None:
            yield Finding((*_POD, "affinity", field), message, hint)
    for index, volume in enumerate(context.job.kubernetes.pod.volumes):
        if volume.secret is not None:
            yield Finding((*_POD, "volumes", index, "secret"), message, "write it as a projected volume")
