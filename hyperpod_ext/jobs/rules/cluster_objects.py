"""Objects of Kubernetes, Kueue and the operators: names, queues, volumes, and fields that the API server refuses."""

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
    "Kueue acts on both, and only on jobs in one of its queues; without scheduling.queue they say nothing.",
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
    "Namespaces hyperpod-ns-TEAM belong to task governance: its admission policy refuses pods without a queue.",
    "Set scheduling.queue: NAMESPACE-localqueue.",
    targets=KUBERNETES,
)
def governed_namespace_has_a_queue(context: Context) -> Iterator[Finding]:
    job, namespace = context.job, context.job.kubernetes.namespace
    governed = namespace is not None and namespace.startswith("hyperpod-ns-")
    if governed and job.scheduling.queue is None:
        hint = f"add scheduling.queue: {namespace}-localqueue"
        yield Finding(("scheduling", "queue"), f"namespace {namespace} admits no pod without a queue", hint)


@rule(
    "HPX143",
    "error",
    "the name is too long for its pods",
    "Names of pods are made from the job's name and must be names of hosts, of at most 63 characters.",
    "Choose a shorter name.",
)
def pod_names_fit(context: Context) -> Iterator[Finding]:
    suffix = context.capabilities.pod_suffix if context.capabilities else ""
    if suffix and len(context.job.name) + len(suffix) > 63:
        most = 63 - len(suffix)
        message = f"pods would be called `{context.job.name}{suffix}`, longer than 63 characters"
        yield Finding(("name",), message, f"at most {most} characters")


@rule(
    "HPX144",
    "warning",
    "a NetworkPolicy that protects nothing",
    "Pods on the node's network are outside every NetworkPolicy: any host that reaches the node can stop the job.",
    "Leave host_network out, or guard the nodes with security groups.",
    targets=KUBERNETES,
)
def policy_reaches_the_pods(context: Context) -> Iterator[Finding]:
    only = context.job.kubernetes
    if only.host_network and only.network_policy:
        yield Finding(
            ("kubernetes", "host_network"), "no NetworkPolicy holds on the node's own network", "leave it out"
        )


@rule(
    "HPX145",
    "error",
    "two volumes in one place",
    "Kubernetes refuses a container with two mounts at one path. A claim or a folder of the node at /dev/shm, or above "
    "it, would take the place of the memory that ranks share there.",
    "Give each volume a path of its own.",
    reads=("mode", "volumes", "kubernetes.container", "kubernetes.pod"),
)
def mounts_are_apart(context: Context) -> Iterator[Finding]:
    seen = {labels.SECRET_DIR: "the job's secret"} if context.job.has_agent else {}
    for index, volume in enumerate(context.job.volumes):
        place = volume.path.rstrip("/") or "/"
        if place in seen:
            yield Finding(("volumes", index, "path"), f"`{place}` is taken by {seen[place]}", "choose another path")
        seen.setdefault(place, f"volume {index}")
        if place == "/":
            yield from _instead_of_memory(("volumes", index, "path"), place)
    for index, mount in enumerate(context.job.kubernetes.container.get("volumeMounts", ())):
        if (place := mount["mountPath"].rstrip("/") or "/") in seen:
            yield Finding((*_MOUNTS, index, "mountPath"), f"`{place}` is taken by {seen[place]}", "choose another path")
        if place == "/":
            yield from _instead_of_memory((*_MOUNTS, index, "mountPath"), place)
    for path, mounted, on_node in _of_more_than_the_pod(context.job):
        place = mounted.rstrip("/")
        if place and on_node.rstrip("/") != place:  # otherwise it is the node's own memory or devices
            yield from _instead_of_memory(path, place)


def _of_more_than_the_pod(job: JobConfig) -> Iterator[tuple[Path, str, str]]:
    """Yield mounts of volumes that several pods share: the field, the path in the container, and the path on the node,
    if any."""
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
    """Report a mount that hides the memory at /dev/shm, or all files of the image."""
    if place == "/":
        yield Finding(path, "would hide the whole image, /dev/shm among it", "choose another path")
    elif is_below(_SHARED_MEMORY, place):
        message = f"would take the place of {_SHARED_MEMORY}, the memory that ranks share"
        hint = "choose another path; for the size of that memory write shared_memory_mib"
        yield Finding(path, message, hint)


@rule(
    "HPX129",
    "error",
    "a volume over the addresses that hyperpodrun keeps",
    "hyperpodrun stores its pod's addresses from the operator at /opt/ml/input/config. On a claim or a folder of the "
    "node, pods would share one file, and each would read the address of another.",
    "Choose another path, or mount a volume of kind scratch there.",
)
def addresses_are_each_pods_own(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target != "hyperpod-eks" or job.kubernetes.launcher != "hyperpodrun":
        return
    for path, place, _ in _of_more_than_the_pod(job):
        if is_below(labels.ADDRESSES_DIR, place) and place.rstrip("/"):
            message = f"hyperpodrun keeps each pod's addresses at {labels.ADDRESSES_DIR}, and pods would share this"
            yield Finding(path, message, "choose another path, or a volume of kind scratch")


@rule(
    "HPX146",
    "warning",
    "a privileged container",
    "An attacker in the container controls the node and every job on it.",
    "Leave kubernetes.privileged out; nothing here needs it.",
    targets=KUBERNETES,
)
def nothing_is_privileged(context: Context) -> Iterator[Finding]:
    if context.job.kubernetes.privileged:
        yield Finding(("kubernetes", "privileged"), "the container owns the node", "leave it out if you can")


@rule(
    "HPX147",
    "error",
    "groups of nodes do not add up",
    "The operator counts the nodes of all groups; `nodes` must be their sum, elastic.max_nodes that of their maxima.",
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
            yield Finding(("node_groups", index, "name"), f"a second group is called `{name}`", "choose another name")
    total = sum(group.nodes for group in job.node_groups)
    if total != job.nodes:
        yield Finding(("nodes",), f"the groups have {total} nodes together, not {job.nodes}", f"write {total}")
    most = sum(group.max_nodes or group.nodes for group in job.node_groups)
    if job.elastic is not None and most != job.elastic.max_nodes:
        message = f"the groups grow to {most} nodes together, not {job.elastic.max_nodes}"
        yield Finding(("elastic", "max_nodes"), message, f"write {most}, or correct max_nodes of the groups")
    for index, group in enumerate(job.node_groups):
        if group.max_nodes is not None and group.max_nodes < group.nodes:
            yield Finding(("node_groups", index, "max_nodes"), "is less than nodes", f"write at least {group.nodes}")
    if job.spares and any(group.spares for group in job.node_groups):
        yield Finding(("spares",), "groups have spares of their own", "write spares in one of the two places")


@rule(
    "HPX148",
    "error",
    "more annotations than Kubernetes keeps",
    "All annotations of an object, the spec that we keep there among them, may have 256 KiB together.",
    "Shorten args, env or annotations; long settings belong in a file of the image or in a ConfigMap.",
    targets=KUBERNETES,
)
def annotations_fit(context: Context) -> Iterator[Finding]:
    notes = dict(context.job.annotations) | note_of(context.job)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in notes.items())
    if size > _MOST_BYTES:
        yield Finding(("annotations",), f"the spec and its annotations are {size // 1024} KiB", "at most 256 KiB")


@rule(
    "HPX149",
    "error",
    "a toleration that Kubernetes refuses",
    "`Exists` has no value, `Equal` needs one and a key, and seconds only go with `NoExecute`.",
    "Correct the toleration.",
    reads=("scheduling.tolerations",),
)
def tolerations_are_complete(context: Context) -> Iterator[Finding]:
    for index, one in enumerate(context.job.scheduling.tolerations):
        path = ("scheduling", "tolerations", index)
        if one.operator == "Exists" and one.value is not None:
            yield Finding((*path, "value"), "`Exists` takes no value", "remove it, or write operator: Equal")
        if one.operator == "Equal" and (one.key is None or one.value is None):
            yield Finding(path, "`Equal` needs a key and a value", "add them, or write operator: Exists")
        if one.seconds is not None and one.effect != "NoExecute":
            yield Finding((*path, "seconds"), "only goes with effect NoExecute", "remove it, or write the effect")


@rule(
    "HPX150",
    "error",
    "a variable that is written twice",
    "Kubernetes takes one of the two values, and which one is easily misread.",
    "Keep one of the two.",
    reads=("env", "kubernetes.secret_env", "kubernetes.container"),
)
def variables_are_written_once(context: Context) -> Iterator[Finding]:
    seen = set(context.job.env)
    for index, entry in enumerate(context.job.kubernetes.secret_env):
        path = ("kubernetes", "secret_env", index, "name")
        if entry.name in seen:
            yield Finding(path, f"{entry.name} is written twice", "keep one of the two")
        if entry.name.startswith("HPX_"):
            yield Finding(path, "names that start with HPX_ are set by the launcher", "choose another name")
        seen.add(entry.name)
    for index, variable in enumerate(context.job.kubernetes.container.get("env", ())):
        name = variable["name"]
        if name in seen:
            at = ("kubernetes", "container", "env", index, "name")
            yield Finding(at, f"{name} is written twice", "keep one of the two")
        seen.add(name)


@rule(
    "HPX151",
    "error",
    "a label that is ours",
    "Labels and annotations under hyperpod-ext/, and those of Kueue, are set from other fields; pods and policies are "
    "found by them.",
    "Choose another key; for Kueue write scheduling.",
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
    "HyperPod resumes PyTorchJobs only in namespace kubeflow and in namespaces that begin with hyperpod; elsewhere "
    "relaunch is the operator's back-off limit.",
    "Use such a namespace, or leave relaunch.max_times to the back-off limit.",
)
def auto_resume_has_its_namespace(context: Context) -> Iterator[Finding]:
    job, namespace = context.job, context.job.kubernetes.namespace
    asked = context.target == "kubeflow" and job.relaunch.max_times is not None
    if asked and namespace is not None and not namespace.startswith(_AUTO_RESUME_NAMESPACES):
        message = f"HyperPod does not resume jobs in namespace {namespace}"
        yield Finding(("relaunch", "max_times"), message, "use kubeflow, or a namespace that begins with hyperpod")
