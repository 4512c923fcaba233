"""Checks for fields that contradict each other within one part of `kubernetes.container` or `kubernetes.pod`. Pure.

A part is one object of Kubernetes' API, such as a container, a volume mount or a probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.sizes import size_of

Fields = Mapping[str, Any]
Contradiction = tuple[Path, str, str]
"""A field's path within the part of the pod, a message, and a hint."""

_KEEP = "keep one of the two"
_OWN_NAME = "give each a different name"
_OF_VARIABLES = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
_OF_VARIABLES |= {"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
_OF_FILES = {"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations"}
_OF_METADATA = ("metadata.labels['", "metadata.annotations['")
_OF_CONTAINERS = ("cpu", "memory", "ephemeral-storage")


def contradictions(job: JobConfig) -> Iterator[Finding]:
    """Yield a finding for each contradiction between fields of the same part of the pod."""
    sections = (("container", "TrainingContainer"), ("pod", "TrainingPod"))
    for section, kind in sections:
        if fields := getattr(job.kubernetes, section):
            for found, at, part in _parts(kind, fields, ("kubernetes", section)):
                for place, message, hint in _CHECKS[found](part) if found in _CHECKS else ():
                    yield Finding((*at, *place), message, hint)


def _parts(kind: str, value: Any, at: Path) -> Iterator[tuple[str, Path, Fields]]:
    """Yield type, path and fields of `value` and of each part in it.

    If the type of a part is this project's narrower form of a Kubernetes type, the part is yielded for both types.
    """
    # imported here, because the import is slow and few specs need it
    from hyperpod_ext.config.job.pods.values import all_types, base_of

    if kind.startswith(("[]", "{}")):
        for place, one in enumerate(value) if isinstance(value, list) else value.items():
            yield from _parts(kind[2:], one, (*at, place))
    elif kind in all_types():
        yield from ((name, at, value) for name in dict.fromkeys((kind, base_of(kind))))
        for name, one in value.items():
            yield from _parts(all_types()[kind][name], one, (*at, name))


def _of_container(container: Fields) -> Iterator[Contradiction]:
    for name in ("livenessProbe", "startupProbe"):
        if container.get(name, {}).get("successThreshold", 1) != 1:
            yield (name, "successThreshold"), f"successThreshold of a {name} must be 1", "remove it"
    if "terminationGracePeriodSeconds" in container.get("readinessProbe", {}):
        yield ("readinessProbe", "terminationGracePeriodSeconds"), "has no effect in a readinessProbe", "remove it"
    places = [one["mountPath"].rstrip("/") for one in container.get("volumeMounts", ())]
    for place in _twice(places):
        yield ("volumeMounts",), f"two mounts have the path {place}", "give each a different path"
    names = [port["name"] for port in container.get("ports", ()) if "name" in port]
    for name in _twice(names):
        yield ("ports",), f"two ports have the name {name}", _OWN_NAME
    yield from _asked_ports(container, names)


def _asked_ports(container: Fields, names: list[str]) -> Iterator[Contradiction]:
    life = container.get("lifecycle", {})
    askers: dict[Path, Fields] = {
        (name,): container.get(name, {}) for name in ("livenessProbe", "readinessProbe", "startupProbe")
    }
    askers |= {("lifecycle", name): life.get(name, {}) for name in ("postStart", "preStop")}
    for at, asker in askers.items():
        for kind in ("httpGet", "tcpSocket"):
            port = asker.get(kind, {}).get("port")
            if isinstance(port, str) and port not in names:
                message = f"no port of the container has the name `{port}`"
                yield (*at, kind, "port"), message, "write the port's number, or add a port with this name"


def _of_init_container(container: Fields) -> Iterator[Contradiction]:
    for name in ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"):
        if "restartPolicy" not in container and name in container:
            yield (name,), f"{name} is valid only with restartPolicy: Always", "write it, or remove this"


def _of_resources(resources: Fields) -> Iterator[Contradiction]:
    limits = resources.get("limits", {})
    for name, asked in resources.get("requests", {}).items():
        if name in limits and size_of(asked) > size_of(limits[name]):
            message = f"requests {asked} of {name}, more than its limit {limits[name]}"
            yield ("requests", name), message, "request at most the limit"


def _of_variable(variable: Fields) -> Iterator[Contradiction]:
    if "value" in variable and "valueFrom" in variable:
        yield ("value",), "a variable cannot have both value and valueFrom", _KEEP


def _of_value_source(source: Fields) -> Iterator[Contradiction]:
    path = source.get("fieldRef", {}).get("fieldPath")
    if path is not None and path not in _OF_VARIABLES and not _is_of_metadata(path):
        hint = f"write {', '.join(sorted(_OF_VARIABLES))}"
        yield ("fieldRef", "fieldPath"), f"a variable cannot read the field `{path}`", hint


def _of_resource_field(reference: Fields) -> Iterator[Contradiction]:
    name = reference["resource"].partition(".")[2]
    if name not in _OF_CONTAINERS and not name.startswith("hugepages-"):
        message = f"containers cannot read the resource `{reference['resource']}`"
        yield ("resource",), message, f"write {', '.join(_OF_CONTAINERS)}"


def _of_file(file: Fields) -> Iterator[Contradiction]:
    path = file.get("fieldRef", {}).get("fieldPath")
    if path is not None and path not in _OF_FILES and not _is_of_metadata(path):
        message = f"a file cannot have the content of the field `{path}`"
        yield ("fieldRef", "fieldPath"), message, "use a variable instead"
    if "containerName" not in file.get("resourceFieldRef", {"containerName": ""}):
        message = "in a file, resourceFieldRef needs a containerName"
        yield ("resourceFieldRef",), message, "add containerName"


def _of_mount(mount: Fields) -> Iterator[Contradiction]:
    if "subPath" in mount and "subPathExpr" in mount:
        yield ("subPathExpr",), "subPath and subPathExpr exclude each other", _KEEP
    if mount.get("recursiveReadOnly") in ("Enabled", "IfPossible") and not mount.get("readOnly"):
        yield ("recursiveReadOnly",), "recursiveReadOnly needs readOnly: true", "add it"


def _of_pod(pod: Fields) -> Iterator[Contradiction]:
    containers = [*pod.get("initContainers", ()), *pod.get("containers", ())]
    lists = {"containers": containers} | {
        field: pod.get(field, ()) for field in ("volumes", "resourceClaims", "schedulingGates")
    }
    for field, items in lists.items():
        for name in _twice([one["name"] for one in items]):
            yield (field,), f"two entries of {field} have the name {name}", _OWN_NAME
    rules = [(one["topologyKey"], one["whenUnsatisfiable"]) for one in pod.get("topologySpreadConstraints", ())]
    for key, wish in _twice(rules):
        yield ("topologySpreadConstraints",), f"two constraints have the same {key} and {wish}", _KEEP
    if pod.get("dnsPolicy") == "None" and "nameservers" not in pod.get("dnsConfig", {}):
        yield ("dnsPolicy",), "dnsPolicy: None needs dnsConfig.nameservers", "add them"
    if pod.get("hostPID") and pod.get("shareProcessNamespace"):
        yield ("shareProcessNamespace",), "shareProcessNamespace and hostPID exclude each other", _KEEP
    if pod.get("hostUsers") is False and (pod.get("hostPID") or pod.get("hostIPC")):
        yield ("hostUsers",), "hostUsers: false excludes hostPID and hostIPC", "remove it"


def _of_requirement(requirement: Fields) -> Iterator[Contradiction]:
    operator, found = requirement["operator"], requirement.get("values", [])
    if operator in ("In", "NotIn") and not found:
        yield (), f"`{operator}` needs values", "add values"
    if operator in ("Exists", "DoesNotExist") and found:
        yield ("values",), f"`{operator}` excludes values", "remove them, or write `In`"
    if operator in ("Gt", "Lt") and (len(found) != 1 or not found[0].lstrip("-").isdecimal()):
        yield (), f"`{operator}` needs one whole number in quotes as its values", 'write values: ["1"], for example'


def _of_node_term(term: Fields) -> Iterator[Contradiction]:
    for index, one in enumerate(term.get("matchFields", ())):
        if one["key"] != "metadata.name" or one["operator"] not in ("In", "NotIn") or len(one.get("values", ())) != 1:
            message = "matchFields only supports `metadata.name`, with `In` or `NotIn` and the name of one node"
            yield ("matchFields", index), message, "use matchExpressions for labels of nodes"


def _of_pod_term(term: Fields) -> Iterator[Contradiction]:
    for field in ("matchLabelKeys", "mismatchLabelKeys"):
        if field in term and "labelSelector" not in term:
            yield (field,), f"{field} needs a labelSelector", "add one"


def _of_spread(rule: Fields) -> Iterator[Contradiction]:
    yield from _of_pod_term(rule)
    if "minDomains" in rule and rule["whenUnsatisfiable"] != "DoNotSchedule":
        yield ("minDomains",), "minDomains is valid only with whenUnsatisfiable: DoNotSchedule", "remove it"


def _of_security(may: Fields) -> Iterator[Contradiction]:
    if may.get("runAsNonRoot") and may.get("runAsUser") == 0:
        yield ("runAsNonRoot",), "runAsUser 0 is root, which runAsNonRoot forbids", "change one"
    if may.get("allowPrivilegeEscalation") is False:
        added = may.get("capabilities", {}).get("add", ())
        what = "capability SYS_ADMIN" if {"SYS_ADMIN", "CAP_SYS_ADMIN"} & {*added} else "privileged"
        if what != "privileged" or may.get("privileged"):
            message = f"allowPrivilegeEscalation: false excludes {what}"
            yield ("allowPrivilegeEscalation",), message, "change one of the two"


def _of_profile(profile: Fields) -> Iterator[Contradiction]:
    if (profile["type"] == "Localhost") != ("localhostProfile" in profile):
        message = "localhostProfile is required with type: Localhost, and invalid with other types"
        yield (), message, "add it, or correct the type"


_CHECKS: dict[str, Callable[[Fields], Iterator[Contradiction]]] = {
    "AppArmorProfile": _of_profile,
    "Container": _of_container,
    "DownwardAPIVolumeFile": _of_file,
    "EnvVar": _of_variable,
    "EnvVarSource": _of_value_source,
    "InitContainer": _of_init_container,
    "LabelSelectorRequirement": _of_requirement,
    "NodeSelectorRequirement": _of_requirement,
    "NodeSelectorTerm": _of_node_term,
    "PodAffinityTerm": _of_pod_term,
    "PodSecurityContext": _of_security,
    "PodSpec": _of_pod,
    "ResourceFieldSelector": _of_resource_field,
    "ResourceRequirements": _of_resources,
    "SeccompProfile": _of_profile,
    "SecurityContext": _of_security,
    "TopologySpreadConstraint": _of_spread,
    "VolumeMount": _of_mount,
}


def _is_of_metadata(path: str) -> bool:
    return path.startswith(_OF_METADATA) and path.endswith("']") and len(path) > len("metadata.labels['']")


def _twice(items: list[Any]) -> list[Any]:
    return [one for one, count in Counter(items).items() if count > 1]
