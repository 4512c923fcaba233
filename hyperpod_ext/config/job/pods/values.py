"""Types that check `kubernetes.container` and `kubernetes.pod`, and allow less than Kubernetes' own types; and value
forms.

A value form is the pydantic annotation for the value of a field `Type.field`. For a list, the form applies to each
item; for a mapping, the form applies to each value.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from hyperpod_ext.catalog.pod_fields import choices, pod_types, required_fields
from hyperpod_ext.config.names import AbsolutePath, DnsLabel, EnvName, LabelKey, LabelValue, ObjectName, stays_below

_AMOUNT = re.compile(r"[0-9]+(\.[0-9]*)?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?|\.[0-9]+([KMGTPE]i|[numkMGTPE])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")


def _amount(value: Any) -> str:
    """Return a Kubernetes quantity as text, because the resources of a TrainJob accept no numbers."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if _AMOUNT.fullmatch(text):
        return text
    raise ValueError(f"`{value}` is not a quantity of Kubernetes; write for example `500m`, `2` or `32Gi`")


def _port_or_name(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and len(value) <= 15 and _PORT_NAME.fullmatch(value):
        return value
    raise ValueError(f"`{value}` is not a port; write a number from 1 to 65535, or the name of a port of the container")


def _address(text: str) -> str:
    import ipaddress  # `ipaddress` is imported here because few specs need it

    ipaddress.ip_address(text)
    return text


PLAIN: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "quantity": Annotated[str, PlainValidator(_amount, json_schema_input_type=str), Field(examples=["1Gi"])],
    "port-or-name": Annotated[
        str | int, PlainValidator(_port_or_name, json_schema_input_type=str | int), Field(examples=[8000])
    ],
}
"""Value forms of plain types, by the name of the type."""

_NARROWED: dict[str, tuple[str, str, dict[str, str]]] = {
    "TrainingContainer": (
        "Container",
        "name image command args workingDir imagePullPolicy restartPolicy restartPolicyRules",
        {"env": "[]ReferredVariable", "resources": "Limits", "securityContext": "OwnSecurity"},
    ),
    "ReferredVariable": ("EnvVar", "value", {}),
    "Limits": ("ResourceRequirements", "requests", {}),
    "OwnSecurity": ("SecurityContext", "privileged", {}),
    "TrainingPod": (
        "PodSpec",
        "ephemeralContainers hostNetwork hostname hostnameOverride imagePullSecrets nodeName nodeSelector "
        "priorityClassName restartPolicy serviceAccount serviceAccountName subdomain terminationGracePeriodSeconds "
        "tolerations",
        {"containers": "[]SideContainer", "initContainers": "[]InitContainer"},
    ),
    "SideContainer": ("Container", "restartPolicy restartPolicyRules", {}),
    "InitContainer": ("Container", "restartPolicyRules", {}),
}
"""Types that allow less than a type of Kubernetes, by name. Each entry has the name of Kubernetes' type, the excluded
fields, and the types of narrowed fields. Excluded fields are fields that the spec has elsewhere, or that the job
sets."""

_REQUIRED: dict[str, str] = {
    **dict.fromkeys(("TrainingContainer", "TrainingPod"), ""),
    **dict.fromkeys(("SideContainer", "InitContainer"), "name image"),
    "ReferredVariable": "name valueFrom",
    **dict.fromkeys(("ConfigMapEnvSource", "SecretEnvSource", "ConfigMapProjection", "SecretProjection"), "name"),
    **dict.fromkeys(("ConfigMapVolumeSource", "LocalObjectReference", "PodDNSConfigOption"), "name"),
    **dict.fromkeys(("ConfigMapKeySelector", "SecretKeySelector"), "name key"),
    "EphemeralVolumeSource": "volumeClaimTemplate",
    "ExecAction": "command",
    "HostAlias": "ip hostnames",
    "ImageVolumeSource": "reference",
    "PersistentVolumeClaimSpec": "accessModes resources",
    "ProjectedVolumeSource": "sources",
    "SecretVolumeSource": "secretName",
    "VolumeResourceRequirements": "requests",
}
"""Required fields of each type. For these types, the list replaces the list of Kubernetes' schema."""

ONE_OF: dict[str, str] = {
    "DownwardAPIVolumeFile": "fieldRef resourceFieldRef",
    "EnvFromSource": "configMapRef secretRef",
    "EnvVarSource": "",
    "LifecycleHandler": "",
    "PodResourceClaim": "resourceClaimName resourceClaimTemplateName",
    "Probe": "exec httpGet tcpSocket grpc",
    "Volume": "",
    "VolumeProjection": "",
}
"""For each type, the names of the fields of which exactly one must be set. An empty text stands for all fields except
`name`."""

FILLED = frozenset(
    {
        *("ExecAction.command", "HostAlias.hostnames", "NodeSelector.nodeSelectorTerms"),
        *("PersistentVolumeClaimSpec.accessModes", "ProjectedVolumeSource.sources"),
        "VolumeResourceRequirements.requests",
    }
)
"""Fields `Type.field` whose list or mapping must not be empty."""
MOST_ITEMS = {"PodDNSConfig.nameservers": 3, "PodDNSConfig.searches": 32}


def _text(pattern: str, example: str, most: int | None = None) -> Any:
    return Annotated[str, Field(pattern=pattern, max_length=most, examples=[example])]


def _number(least: int, most: int | None = None, example: int = 1) -> Any:
    return Annotated[int, Field(ge=least, le=most, examples=[example])]


_VALUES: tuple[tuple[Any, str], ...] = (
    (
        Annotated[DnsLabel, Field(examples=["work"])],
        "Container.name PodAffinityTerm.namespaces PodResourceClaim.name ResourceClaim.name ResourceClaim.request "
        "Volume.name VolumeDevice.name VolumeMount.name",
    ),
    (
        Annotated[ObjectName, Field(examples=["settings"])],
        "ConfigMapEnvSource.name ConfigMapKeySelector.name ConfigMapProjection.name ConfigMapVolumeSource.name "
        "LocalObjectReference.name PersistentVolumeClaimSpec.volumeName PersistentVolumeClaimVolumeSource.claimName "
        "PodResourceClaim.resourceClaimName PodResourceClaim.resourceClaimTemplateName PodSpec.runtimeClassName "
        "PodSpec.schedulerName SecretEnvSource.name SecretKeySelector.name SecretProjection.name "
        "SecretVolumeSource.secretName",
    ),
    (Annotated[ObjectName, Field(max_length=63, examples=["s3.csi.aws.com"])], "CSIVolumeSource.driver"),
    (
        Annotated[LabelKey, Field(examples=["example.com/team"])],
        "LabelSelectorRequirement.key NodeSelectorRequirement.key PodAffinityTerm.matchLabelKeys "
        "PodAffinityTerm.mismatchLabelKeys PodAffinityTerm.topologyKey PodReadinessGate.conditionType "
        "PodSchedulingGate.name TopologySpreadConstraint.matchLabelKeys TopologySpreadConstraint.topologyKey",
    ),
    (LabelValue, "LabelSelector.matchLabels LabelSelectorRequirement.values ObjectMeta.labels"),
    (
        Annotated[AbsolutePath, Field(examples=["/work"])],
        "Container.terminationMessagePath HostPathVolumeSource.path NFSVolumeSource.path VolumeDevice.devicePath "
        "VolumeMount.mountPath",
    ),
    (
        Annotated[_text(r"^[^/\x00:][^\x00:]*$", "part/of-it"), AfterValidator(stays_below)],
        "DownwardAPIVolumeFile.path KeyToPath.path ServiceAccountTokenProjection.path VolumeMount.subPath "
        "VolumeMount.subPathExpr",
    ),
    (Annotated[str, AfterValidator(_address), Field(examples=["10.0.0.2"])], "HostAlias.ip PodDNSConfig.nameservers"),
    (Annotated[EnvName, Field(examples=["LEVEL"])], "EnvVar.name"),
    (
        _text(r"^[-._a-zA-Z0-9]{1,253}$", "config.yaml"),
        "ConfigMapKeySelector.key KeyToPath.key SecretKeySelector.key",
    ),
    (_text(r"^(limits|requests)\.[-./a-zA-Z0-9]+$", "limits.memory"), "ResourceFieldSelector.resource"),
    (_text(r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", "APP_"), "EnvFromSource.prefix"),
    (_text(r"^([a-z0-9]+-)*[a-z0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$", "http", 15), "ContainerPort.name"),
    (_text(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", "store"), "HostAlias.hostnames"),
    (_text(r"^[A-Z][A-Z0-9_]*$", "IPC_LOCK"), "Capabilities.add Capabilities.drop"),
    (_text(r"^[-!#$%&'*+.^_`|~0-9A-Za-z]+$", "Accept"), "HTTPHeader.name"),
    (
        _text(r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*$", "net.ipv4.tcp_syncookies", 253),
        "Sysctl.name",
    ),
    (Annotated[str, Field(min_length=1, examples=["repo/log:1"])], "Container.image ImageVolumeSource.reference"),
    (
        Annotated[str, Field(min_length=1)],
        "AppArmorProfile.localhostProfile NFSVolumeSource.server ObjectFieldSelector.fieldPath PodDNSConfigOption.name "
        "SeccompProfile.localhostProfile",
    ),
    (_number(1, 65535, 8000), "ContainerPort.containerPort ContainerPort.hostPort GRPCAction.port"),
    (
        _number(1, 2**31 - 1),
        "Probe.periodSeconds Probe.terminationGracePeriodSeconds Probe.timeoutSeconds",
    ),
    (
        _number(0, 2**31 - 1, 1000),
        "PodSecurityContext.fsGroup PodSecurityContext.runAsGroup PodSecurityContext.runAsUser "
        "PodSecurityContext.supplementalGroups SecurityContext.runAsGroup SecurityContext.runAsUser",
    ),
    (
        _number(0, 0o777, 0o400),  # file modes are decimal numbers in Kubernetes: write 288 for octal 0440
        "ConfigMapVolumeSource.defaultMode DownwardAPIVolumeFile.mode DownwardAPIVolumeSource.defaultMode "
        "KeyToPath.mode ProjectedVolumeSource.defaultMode SecretVolumeSource.defaultMode",
    ),
    (
        _number(1),
        "PodSpec.activeDeadlineSeconds Probe.failureThreshold Probe.successThreshold TopologySpreadConstraint.maxSkew "
        "TopologySpreadConstraint.minDomains",
    ),
    (_number(0), "Probe.initialDelaySeconds SleepAction.seconds"),
    (_number(1, 100), "PreferredSchedulingTerm.weight WeightedPodAffinityTerm.weight"),
    (_number(600, 2**32, 3600), "ServiceAccountTokenProjection.expirationSeconds"),
    (Literal["RuntimeDefault", "Unconfined", "Localhost"], "AppArmorProfile.type SeccompProfile.type"),
    (Literal["Always"], "Container.restartPolicy"),
    (Literal["cpu", "memory"], "ContainerResizePolicy.resourceName"),
    (Literal["NotRequired", "RestartContainer"], "ContainerResizePolicy.restartPolicy"),
    (Literal["", "Memory"], "EmptyDirVolumeSource.medium"),
    (Literal["In", "NotIn", "Exists", "DoesNotExist"], "LabelSelectorRequirement.operator"),
    (
        Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"],
        "PersistentVolumeClaimSpec.accessModes",
    ),
    (Literal["MountOption", "Recursive"], "PodSecurityContext.seLinuxChangePolicy"),
    (Literal["Disabled", "Enabled", "IfPossible"], "VolumeMount.recursiveReadOnly"),
)
_KEYS: tuple[tuple[Any, str], ...] = (
    (Annotated[LabelKey, Field(examples=["memory"])], "ResourceRequirements.limits ResourceRequirements.requests"),
    (
        Annotated[LabelKey, Field(examples=["team"])],
        "LabelSelector.matchLabels ObjectMeta.annotations ObjectMeta.labels",
    ),
    (Literal["storage"], "VolumeResourceRequirements.limits VolumeResourceRequirements.requests"),
)


@cache
def all_types() -> dict[str, dict[str, str]]:
    """Return Kubernetes' types and the narrowed types of this module, each with its fields in rendered order."""
    types = pod_types()
    narrowed = {
        name: {field: more.get(field, kind) for field, kind in types[base].items() if field not in without.split()}
        for name, (base, without, more) in _NARROWED.items()
    }
    return types | narrowed


def base_of(kind: str) -> str:
    """Return the name of the Kubernetes type that the type `kind` narrows, or `kind` itself."""
    return _NARROWED[kind][0] if kind in _NARROWED else kind


def required(kind: str) -> list[str]:
    """Return the names of the required fields of the type `kind`."""
    found = _REQUIRED.get(kind)
    return required_fields().get(base_of(kind), []) if found is None else found.split()


def form_of(kind: str, field: str) -> Any:
    """Return the value form of the field `Type.field`, or the form of its plain type `kind`."""
    return forms().get(field, PLAIN[kind])


@cache
def forms() -> dict[str, Any]:
    """Return value forms by `Type.field`: the choices that Kubernetes publishes, and the forms in `_VALUES`."""
    published = {place: Literal[tuple(listed)] for place, listed in choices().items()}
    return published | {place: form for form, places in _VALUES for place in places.split()}


@cache
def key_forms() -> dict[str, Any]:
    """Return the pydantic annotations for the keys of mappings, by `Type.field`."""
    return {place: form for form, places in _KEYS for place in places.split()}
