"""Types of `kubernetes.container` and `kubernetes.pod` that take less than Kubernetes' own, and forms of their values.

A form is a type of pydantic for the fields `Type.field`: for each item of a list and each value of a mapping.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PlainValidator, PositiveInt

from hyperpod_ext.catalog.pod_fields import pod_types, required_fields
from hyperpod_ext.config.names import AbsolutePath, DnsLabel, EnvName, LabelKey, LabelValue, ObjectName, stays_below

_AMOUNT = re.compile(r"[0-9]+(\.[0-9]*)?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?|\.[0-9]+([KMGTPE]i|[numkMGTPE])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")


def _amount(value: Any) -> str:
    """A quantity of Kubernetes as text: resources of a TrainJob take no numbers."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if _AMOUNT.fullmatch(text):
        return text
    raise ValueError(f"`{value}` is no amount of Kubernetes; write it as `500m`, `2` or `32Gi`")


def _port_or_name(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and len(value) <= 15 and _PORT_NAME.fullmatch(value):
        return value
    raise ValueError(f"`{value}` is no port; write a number from 1 to 65535, or the name of one of the container")


def _address(text: str) -> str:
    import ipaddress  # few specs name an address

    ipaddress.ip_address(text)
    return text


RelativePath = Annotated[
    str, Field(pattern=r"^[^/\x00:][^\x00:]*$", examples=["part/of-it"]), AfterValidator(stays_below)
]
"""A path below, without `..`."""
_PULL = Literal["Always", "IfNotPresent", "Never"]
_PROFILE = Literal["RuntimeDefault", "Unconfined", "Localhost"]

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
"""Forms of whole types."""

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
"""Kubernetes' type, fields that the spec has elsewhere or the job relies on, and fields that are narrowed, too."""

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
"""Fields that the API server asks for, or without which a part says nothing, where Kubernetes' types ask for fewer."""

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
"""Fields of which exactly one must be there; none named: all but those that are required."""

FILLED = frozenset(
    {
        *("ExecAction.command", "HostAlias.hostnames", "NodeSelector.nodeSelectorTerms"),
        *("PersistentVolumeClaimSpec.accessModes", "ProjectedVolumeSource.sources"),
        "VolumeResourceRequirements.requests",
    }
)
"""Lists and mappings that must not be empty."""
MOST_ITEMS = {"PodDNSConfig.nameservers": 3, "PodDNSConfig.searches": 32}

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
        RelativePath,
        "DownwardAPIVolumeFile.path KeyToPath.path ServiceAccountTokenProjection.path VolumeMount.subPath "
        "VolumeMount.subPathExpr",
    ),
    (Annotated[EnvName, Field(examples=["LEVEL"])], "EnvVar.name"),
    (
        Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["config.yaml"])],
        "ConfigMapKeySelector.key KeyToPath.key SecretKeySelector.key",
    ),
    (
        Annotated[str, Field(pattern=r"^(limits|requests)\.[-./a-zA-Z0-9]+$", examples=["limits.memory"])],
        "ResourceFieldSelector.resource",
    ),
    (Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", examples=["APP_"])], "EnvFromSource.prefix"),
    (
        Annotated[
            str,
            Field(
                pattern=r"^([a-z0-9]+-)*[a-z0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$",
                max_length=15,
                description="lower-case letters, digits and dashes, at most 15",
                examples=["http"],
            ),
        ],
        "ContainerPort.name",
    ),
    (
        Annotated[
            str,
            Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", examples=["store"]),
        ],
        "HostAlias.hostnames",
    ),
    (
        Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$", examples=["IPC_LOCK"])],
        "Capabilities.add Capabilities.drop",
    ),
    (Annotated[str, Field(pattern=r"^[-!#$%&'*+.^_`|~0-9A-Za-z]+$", examples=["Accept"])], "HTTPHeader.name"),
    (
        Annotated[
            str,
            Field(
                pattern=r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*$",
                max_length=253,
                examples=["net.ipv4.tcp_keepalive_time"],
            ),
        ],
        "Sysctl.name",
    ),
    (Annotated[str, Field(min_length=1, examples=["repo/log:1"])], "Container.image ImageVolumeSource.reference"),
    (
        Annotated[str, Field(min_length=1)],
        "AppArmorProfile.localhostProfile NFSVolumeSource.server "
        "ObjectFieldSelector.fieldPath PodDNSConfigOption.name SeccompProfile.localhostProfile",
    ),
    (
        Annotated[str, AfterValidator(_address), Field(examples=["10.0.0.2"])],
        "HostAlias.ip PodDNSConfig.nameservers",
    ),
    (
        Annotated[int, Field(ge=1, le=65535, examples=[8000])],
        "ContainerPort.containerPort ContainerPort.hostPort GRPCAction.port",
    ),
    (
        Annotated[int, Field(ge=1, le=2**31 - 1)],
        "Probe.periodSeconds Probe.terminationGracePeriodSeconds Probe.timeoutSeconds",
    ),
    (
        Annotated[int, Field(ge=0, le=2**31 - 1)],
        "PodSecurityContext.fsGroup PodSecurityContext.runAsGroup PodSecurityContext.runAsUser "
        "PodSecurityContext.supplementalGroups SecurityContext.runAsGroup SecurityContext.runAsUser",
    ),
    (
        Annotated[int, Field(ge=0, le=0o777)],  # Kubernetes counts in tens: YAML's 0440 is 288
        "ConfigMapVolumeSource.defaultMode DownwardAPIVolumeFile.mode DownwardAPIVolumeSource.defaultMode "
        "KeyToPath.mode ProjectedVolumeSource.defaultMode SecretVolumeSource.defaultMode",
    ),
    (
        Annotated[PositiveInt, Field(examples=[1])],
        "PodSpec.activeDeadlineSeconds Probe.failureThreshold Probe.successThreshold TopologySpreadConstraint.maxSkew "
        "TopologySpreadConstraint.minDomains",
    ),
    (NonNegativeInt, "Probe.initialDelaySeconds SleepAction.seconds"),
    (
        Annotated[int, Field(ge=1, le=100, examples=[1])],
        "PreferredSchedulingTerm.weight WeightedPodAffinityTerm.weight",
    ),
    (Annotated[int, Field(ge=600, le=2**32, examples=[3600])], "ServiceAccountTokenProjection.expirationSeconds"),
    (_PULL, "Container.imagePullPolicy ImageVolumeSource.pullPolicy"),
    (_PROFILE, "AppArmorProfile.type SeccompProfile.type"),
    (Literal["Always"], "Container.restartPolicy"),
    (Literal["File", "FallbackToLogsOnError"], "Container.terminationMessagePolicy"),
    (Literal["TCP", "UDP", "SCTP"], "ContainerPort.protocol"),
    (Literal["cpu", "memory"], "ContainerResizePolicy.resourceName"),
    (Literal["NotRequired", "RestartContainer"], "ContainerResizePolicy.restartPolicy"),
    (Literal["", "Memory"], "EmptyDirVolumeSource.medium"),
    (Literal["HTTP", "HTTPS"], "HTTPGetAction.scheme"),
    (
        Literal["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"],
        "HostPathVolumeSource.type",
    ),
    (Literal["In", "NotIn", "Exists", "DoesNotExist"], "LabelSelectorRequirement.operator"),
    (Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"], "NodeSelectorRequirement.operator"),
    (
        Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"],
        "PersistentVolumeClaimSpec.accessModes",
    ),
    (Literal["Filesystem", "Block"], "PersistentVolumeClaimSpec.volumeMode"),
    (Literal["Always", "OnRootMismatch"], "PodSecurityContext.fsGroupChangePolicy"),
    (Literal["MountOption", "Recursive"], "PodSecurityContext.seLinuxChangePolicy"),
    (Literal["Merge", "Strict"], "PodSecurityContext.supplementalGroupsPolicy"),
    (Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"], "PodSpec.dnsPolicy"),
    (Literal["PreemptLowerPriority", "Never"], "PodSpec.preemptionPolicy"),
    (Literal["Default", "Unmasked"], "SecurityContext.procMount"),
    (
        Literal["Honor", "Ignore"],
        "TopologySpreadConstraint.nodeAffinityPolicy TopologySpreadConstraint.nodeTaintsPolicy",
    ),
    (Literal["DoNotSchedule", "ScheduleAnyway"], "TopologySpreadConstraint.whenUnsatisfiable"),
    (Literal["None", "HostToContainer", "Bidirectional"], "VolumeMount.mountPropagation"),
    (Literal["Disabled", "Enabled", "IfPossible"], "VolumeMount.recursiveReadOnly"),
)
_KEYS: tuple[tuple[Any, str], ...] = (
    (
        LabelKey,
        "LabelSelector.matchLabels ObjectMeta.annotations ObjectMeta.labels ResourceRequirements.limits "
        "ResourceRequirements.requests",
    ),
    (Literal["storage"], "VolumeResourceRequirements.limits VolumeResourceRequirements.requests"),
)


@cache
def all_types() -> dict[str, dict[str, str]]:
    """Kubernetes' types and the narrowed ones, each with its fields in the order in which they are rendered."""
    types = pod_types()
    narrowed = {
        name: {field: more.get(field, kind) for field, kind in types[base].items() if field not in without.split()}
        for name, (base, without, more) in _NARROWED.items()
    }
    return types | narrowed


def base_of(kind: str) -> str:
    """Kubernetes' own name of a type."""
    return _NARROWED[kind][0] if kind in _NARROWED else kind


def required(kind: str) -> list[str]:
    """Fields of a type that must be there."""
    found = _REQUIRED.get(kind)
    return required_fields().get(base_of(kind), []) if found is None else found.split()


def form_of(kind: str, field: str) -> Any:
    """The form of a value of the plain type `kind`, in `Type.field` with Kubernetes' own name of the type."""
    return forms().get(field, PLAIN[kind])


@cache
def forms() -> dict[str, Any]:
    """Forms of values, by `Type.field`."""
    return {place: form for form, places in _VALUES for place in places.split()}


@cache
def key_forms() -> dict[str, Any]:
    """Forms of the names in a mapping."""
    return {place: form for form, places in _KEYS for place in places.split()}
