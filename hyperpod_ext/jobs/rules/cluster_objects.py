"""Rules of Kubernetes, Kueue and operators: names, queues, volumes, and fields that the API server refuses."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import HostVolume, ScratchVolume, is_below
from hyperpod_ext.jobs.contract.spec_annotation import note_of
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule

_MOUNTS: Path = ("kubernetes", "container", "volumeMounts")
_SHARED_MEMORY = "/dev/shm"
_MOST_BYTES = 256 * 1024
_AUTO_RESUME_NAMESPACES = ("kubeflow", "hyperpod")


@rule(
    "HPX141",
    "error",
    "topology or priority without a queue",
    "Only Kueue uses topology and priority, and only for jobs in one of its queues. Without scheduling.queue both "
    "have no effect.",
    "Set scheduling.queue to the local queue of the namespace.",
    targets=KUBERNETES,
)
def queue_is_named(context: Context) -> Iterator[Finding]:
    asked = context.job.scheduling
    if asked.queue is not None:
        return
    if asked.topology is not None:
        yield Finding(("scheduling", "topology"), "needs a queue of Kueue", "add scheduling.queue")
    if asked.priority is not None:
        yield Finding(("scheduling", "priority"), "needs a queue of Kueue", "add scheduling.queue")


@rule(
    "HPX142",
    "error",
    "a team's namespace without its queue",
    "Namespaces hyperpod-ns-TEAM belong to HyperPod's task governance, whose admission policy refuses pods without "
    "a queue.",
    "Set scheduling.queue: NAMESPACE-localqueue.",
    targets=KUBERNETES,
)
def governed_namespace_has_a_queue(context: Context) -> Iterator[Finding]:
    job, namespace = context.job, context.job.kubernetes.namespace
    governed = namespace is not None and namespace.startswith("hyperpod-ns-")
    if governed and job.scheduling.queue is None:
        hint = f"add scheduling.queue: {namespace}-localqueue"
        yield Finding(("scheduling", "queue"), f"namespace {namespace} refuses pods without a queue", hint)


@rule(
    "HPX143",
    "error",
    "the job's name is too long for the names of its pods",
    "A pod's name is the job's name with a suffix. The pod's name is a host name, and therefore has at most 63 "
    "characters.",
    "Choose a shorter name.",
)
def pod_names_fit(context: Context) -> Iterator[Finding]:
    suffix = context.capabilities.pod_suffix if context.capabilities else ""
    if suffix and len(context.job.name) + len(suffix) > 63:
        most = 63 - len(suffix)
        message = f"pods would have the name `{context.job.name}{suffix}`, which is longer than 63 characters"
        yield Finding(("name",), message, f"write at most {most} characters")


@rule(
    "HPX144",
    "warning",
    "a NetworkPolicy that has no effect",
    "A NetworkPolicy does not apply to pods on the node's network. Any host that reaches the node can stop the job.",
    "Remove host_network, or protect the nodes with security groups.",
    targets=KUBERNETES,
)
def policy_reaches_the_pods(context: Context) -> Iterator[Finding]:
    only = context.job.kubernetes
    if only.host_network and only.network_policy:
        yield Finding(
            ("kubernetes", "host_network"),
            "a NetworkPolicy does not protect pods on the node's own network",
            "remove host_network",
        )


@rule(
    "HPX145",
    "error",
    "two volumes with the same path",
    "Kubernetes refuses a container with two mounts at one path. A claim or a folder of the node at /dev/shm, or "
    "above it, would replace the memory that ranks share there.",
    "Give each volume a different path.",
    reads=("mode", "volumes", "kubernetes.container", "kubernetes.pod"),
)
def mounts_are_apart(context: Context) -> Iterator[Finding]:
    seen = {labels.SECRET_DIR: "the job's secret"} if context.job.has_agent else {}
    for index, volume in enumerate(context.job.volumes):
        place = volume.path.rstrip("/") or "/"
        if place in seen:
            yield Finding(
                ("volumes", index, "path"), f"{seen[place]} already has the path `{place}`", "choose another path"
            )
        seen.setdefault(place, f"volumes.{index}")
        if place == "/":
            yield from _instead_of_memory(("volumes", index, "path"), place)
    for index, mount in enumerate(context.job.kubernetes.container.get("volumeMounts", ())):
        if (place := mount["mountPath"].rstrip("/") or "/") in seen:
            yield Finding(
                (*_MOUNTS, index, "mountPath"), f"{seen[place]} already has the path `{place}`", "choose another path"
            )
        if place == "/":
            yield from _instead_of_memory((*_MOUNTS, index, "mountPath"), place)
    for path, mounted, on_node in _of_more_than_the_pod(context.job):
        place = mounted.rstrip("/")
        # a mount of the node's own /dev or /dev/shm at the same path is no problem
        if place and on_node.rstrip("/") != place:
            yield from _instead_of_memory(path, place)


def _of_more_than_the_pod(job: JobConfig) -> Iterator[tuple[Path, str, str]]:
    """Yield the mounts of volumes that several pods share.

    Each mount is the field of the spec, the path in the container, and the path on the node (empty if there is none).
    """
    for index, volume in enumerate(job.volumes):
        if not isinstance(volume, ScratchVolume):
            on_node = volume.host_path if isinstance(volume, HostVolume) else ""
            yield ("volumes", index, "path"), volume.path, on_node
    named = {one["name"]: one for one in job.kubernetes.pod.get("volumes", ())}
    for index, mount in enumerate(job.kubernetes.container.get("volumeMounts", ())):
        if (found := named.get(mount["name"])) is not None and "emptyDir" not in found:
            on_node = found.get("hostPath", {}).get("path", "")
            yield (*_MOUNTS, index, "mountPath"), mount["mountPath"], on_node


def _instead_of_memory(path: Path, place: str) -> Iterator[Finding]:
    """Report a mount that hides the shared memory at /dev/shm, or all files of the image.

    Args:
        path: field of the spec that the report names.
        place: path of the mount in the container.
    """
    if place == "/":
        yield Finding(path, "a mount at / would hide all files of the image and /dev/shm", "choose another path")
    elif is_below(_SHARED_MEMORY, place):
        message = f"would replace {_SHARED_MEMORY}, the memory that ranks share"
        hint = "choose another path; to set the size of this memory, use shared_memory_mib"
        yield Finding(path, message, hint)


@rule(
    "HPX129",
    "error",
    "a volume that hides the addresses of hyperpodrun",
    "hyperpodrun stores its pod's addresses from the operator at /opt/ml/input/config. On a claim or a folder of "
    "the node, pods would share one file, and read each other's addresses.",
    "Choose another path, or mount a volume of kind scratch there.",
)
def addresses_are_each_pods_own(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target != "hyperpod-eks" or job.kubernetes.launcher != "hyperpodrun":
        return
    for path, place, _ in _of_more_than_the_pod(job):
        if is_below(labels.ADDRESSES_DIR, place) and place.rstrip("/"):
            message = f"would make pods share {labels.ADDRESSES_DIR}, where hyperpodrun stores each pod's addresses"
            own = "a volume of kind scratch" if path[0] == "volumes" else "an emptyDir"
            yield Finding(path, message, f"choose another path, or {own}")


@rule(
    "HPX146",
    "warning",
    "a privileged container",
    "An attacker in the container controls the node and every job on it.",
    "Remove kubernetes.privileged. The runtime does not need it.",
    targets=KUBERNETES,
)
def nothing_is_privileged(context: Context) -> Iterator[Finding]:
    if context.job.kubernetes.privileged:
        yield Finding(
            ("kubernetes", "privileged"),
            "the container gets full control over its node",
            "remove kubernetes.privileged if you can",
        )


@rule(
    "HPX147",
    "error",
    "the groups' nodes do not add up to the job's nodes",
    "The operator counts the nodes of all groups. `nodes` must be the sum of the groups' nodes, and "
    "elastic.max_nodes the sum of their max_nodes.",
    "Correct the numbers. AWS's own example of an elastic job has this mistake.",
    reads=("node_groups", "nodes", "elastic.max_nodes", "spares"),
)
def groups_add_up(context: Context) -> Iterator[Finding]:
    job = context.job
    if not job.node_groups:
        return
    names = [group.name for group in job.node_groups]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding(
                ("node_groups", index, "name"), f"another group already has the name `{name}`", "choose another name"
            )
    total = sum(group.nodes for group in job.node_groups)
    if total != job.nodes:
        hint = f"write {total}, or correct nodes of the groups"
        yield Finding(("nodes",), f"is {job.nodes}, but node_groups have {total} nodes in total", hint)
    most = sum(group.max_nodes or group.nodes for group in job.node_groups)
    if job.elastic is not None and most != job.elastic.max_nodes:
        message = f"is {job.elastic.max_nodes}, but node_groups have at most {most} nodes in total"
        yield Finding(("elastic", "max_nodes"), message, f"write {most}, or correct max_nodes of the groups")
    for index, group in enumerate(job.node_groups):
        if group.max_nodes is not None and group.max_nodes < group.nodes:
            yield Finding(("node_groups", index, "max_nodes"), "is less than nodes", f"write at least {group.nodes}")
    if job.spares and any(group.spares for group in job.node_groups):
        yield Finding(("spares",), "are set both in the job and in node_groups", "remove them from one of the two")


@rule(
    "HPX148",
    "error",
    "more annotations than Kubernetes keeps",
    "The annotations of an object may have 256 KiB in total. A copy of the spec is one of the annotations.",
    "Shorten args, env or annotations. Put long settings into a file of the image or into a ConfigMap.",
    targets=KUBERNETES,
)
def annotations_fit(context: Context) -> Iterator[Finding]:
    notes = dict(context.job.annotations) | note_of(context.job)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in notes.items())
    if size > _MOST_BYTES:
        message = f"the annotations, which contain a copy of the spec, have {size // 1024} KiB, but 256 KiB are allowed"
        yield Finding(("annotations",), message, "put long values into a file of the image, or into a ConfigMap")


@rule(
    "HPX149",
    "error",
    "a toleration that Kubernetes refuses",
    "`Exists`, the default operator, allows no value. `Equal` needs a key and a value. `seconds` is valid only with "
    "`NoExecute`.",
    "Correct the toleration.",
    reads=("scheduling.tolerations",),
)
def tolerations_are_complete(context: Context) -> Iterator[Finding]:
    for index, one in enumerate(context.job.scheduling.tolerations):
        path = ("scheduling", "tolerations", index)
        if one.operator == "Exists" and one.value is not None:
            message = "operator `Exists`, the default, allows no value"
            yield Finding((*path, "value"), message, "remove the value, or write operator: Equal")
        if one.operator == "Equal" and (one.key is None or one.value is None):
            yield Finding(path, "`Equal` needs a key and a value", "add them, or write operator: Exists")
        if one.seconds is not None and one.effect != "NoExecute":
            yield Finding(
                (*path, "seconds"), "is valid only with effect NoExecute", "remove it, or write effect: NoExecute"
            )


@rule(
    "HPX150",
    "error",
    "a variable that is set twice",
    "Kubernetes uses only one of the two values, and readers may expect the other.",
    "Keep one of the two values.",
    reads=("env", "kubernetes.secret_env", "kubernetes.container"),
)
def variables_are_written_once(context: Context) -> Iterator[Finding]:
    seen = set(context.job.env)
    for index, entry in enumerate(context.job.kubernetes.secret_env):
        path = ("kubernetes", "secret_env", index, "name")
        if entry.name in seen:
            yield Finding(path, f"{entry.name} is set twice", "keep one of the two")
        if entry.name.startswith("HPX_"):
            yield Finding(path, "variables that start with HPX_ are set by the launcher", "choose another name")
        seen.add(entry.name)
    for index, variable in enumerate(context.job.kubernetes.container.get("env", ())):
        name = variable["name"]
        if name in seen:
            at = ("kubernetes", "container", "env", index, "name")
            yield Finding(at, f"{name} is set twice", "keep one of the two")
        seen.add(name)


@rule(
    "HPX151",
    "error",
    "a label that hp-ext sets itself",
    "hp-ext sets labels and annotations of hyperpod-ext/ and Kueue from other fields, and finds pods and policies "
    "by them.",
    "Choose another key. For labels of Kueue, use the section scheduling.",
    reads=("labels", "annotations"),
)
def own_labels_are_left_alone(context: Context) -> Iterator[Finding]:
    for field in ("labels", "annotations"):
        for key in getattr(context.job, field):
            if key.startswith(("hyperpod-ext/", "kueue.x-k8s.io/")) or key == "app.kubernetes.io/managed-by":
                yield Finding((field, key), "is set by the launcher", "choose another key")


@rule(
    "HPX153",
    "warning",
    "auto-resume works only in some namespaces",
    "HyperPod resumes PyTorchJobs only in namespace kubeflow and in namespaces that begin with hyperpod. In others, "
    "relaunch.max_times only sets the operator's back-off limit.",
    "Use such a namespace, or ignore this if a back-off limit is enough.",
)
def auto_resume_has_its_namespace(context: Context) -> Iterator[Finding]:
    job, namespace = context.job, context.job.kubernetes.namespace
    asked = context.target == "kubeflow" and job.relaunch.max_times is not None
    if asked and namespace is not None and not namespace.startswith(_AUTO_RESUME_NAMESPACES):
        message = f"HyperPod does not resume jobs in namespace {namespace}, where max_times is only the operator's "
        message += "back-off limit"
        yield Finding(
            ("relaunch", "max_times"), message, "use namespace kubeflow, or a namespace that begins with hyperpod"
        )
