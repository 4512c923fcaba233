"""The pod: what each of a job's pods can be told besides what the spec has fields of its own for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.containers import InitContainer, SideContainer
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.mounts import NamedVolume
from hyperpod_ext.config.job.pods.security import PodSecurity
from hyperpod_ext.config.job.pods.selectors import Affinity, TopologySpread
from hyperpod_ext.config.job.pods.words import exactly_one
from hyperpod_ext.config.names import DnsLabel, LabelKey, ObjectName


def _address(text: str) -> str:
    import ipaddress  # few specs name an address

    ipaddress.ip_address(text)
    return text


Address = Annotated[str, AfterValidator(_address), Field(examples=["10.0.0.2"])]
HostName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")]
_T = TypeVar("_T")
_ZONE = "topology.kubernetes.io/zone"
_SIDE = {"name": "log", "image": "repo/log:1"}


class HostAlias(PodPart):
    """A line of /etc/hosts."""

    ip: Address
    """The address."""
    hostnames: Annotated[tuple[HostName, ...], Field(min_length=1, examples=[["store"]])]
    """Names that lead to it."""


class DnsOption(PodPart):
    """An option of the resolver."""

    name: Annotated[str, Field(min_length=1, examples=["ndots"])]
    """Its name."""
    value: str | None = None
    """Its value, in quotes."""


class DnsConfig(PodPart):
    """How names become addresses, besides `dnsPolicy`."""

    nameservers: Annotated[tuple[Address, ...], Field(max_length=3)] = ()
    """Name servers, at most 3."""
    searches: Annotated[tuple[str, ...], Field(max_length=32)] = ()
    """Domains that names are looked for in, at most 32."""
    options: tuple[DnsOption, ...] = ()
    """Options of the resolver."""


class ResourceClaim(PodPart):
    """A claim on devices, for containers that name it."""

    name: Annotated[DnsLabel, Field(examples=["gpu"])]
    """By which containers refer to it."""
    resourceClaimName: ObjectName | None = None
    """A ResourceClaim that exists, which all pods then share."""
    resourceClaimTemplateName: ObjectName | None = None
    """A ResourceClaimTemplate, of which each pod gets a claim."""

    @model_validator(mode="after")
    def _one(self) -> ResourceClaim:
        exactly_one(self, "a claim", "resourceClaimName", "resourceClaimTemplateName")
        return self


class SchedulingGate(PodPart):
    """What keeps pods from being scheduled until somebody removes it."""

    name: Annotated[LabelKey, Field(examples=["example.com/wait"])]
    """Its name."""


class ReadinessGate(PodPart):
    """A condition that somebody else sets, and a pod that is ready has."""

    conditionType: Annotated[LabelKey, Field(examples=["example.com/checked"])]
    """Its type."""


class TrainingPod(PodPart):
    """Each pod, besides what the spec has fields of its own for."""

    initContainers: Annotated[
        tuple[InitContainer, ...], Field(examples=[[{"name": "fetch", "image": "repo/fetch:1"}]])
    ] = ()
    """Containers that run before the one that trains, in this order; and sidecars, with restartPolicy: Always."""
    containers: Annotated[tuple[SideContainer, ...], Field(examples=[[_SIDE]])] = ()
    """Containers beside the one that trains. The pod ends when all have; a sidecar in initContainers is ended."""
    volumes: Annotated[tuple[NamedVolume, ...], Field(examples=[[{"name": "work", "emptyDir": {}}]])] = ()
    """Volumes by name, for what `volumes` of the job has no kind for, and for other containers."""
    securityContext: Annotated[PodSecurity, Field(examples=[{"fsGroup": 1000}])] | None = None
    """As whom all containers run, and whose the volumes are."""
    affinity: (
        Annotated[
            Affinity,
            Field(
                examples=[{"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": _ZONE}]}}]
            ),
        ]
        | None
    ) = None
    """Nodes and pods to be near or far from, besides what `scheduling` asks for."""
    topologySpreadConstraints: Annotated[
        tuple[TopologySpread, ...],
        Field(examples=[[{"maxSkew": 1, "topologyKey": _ZONE, "whenUnsatisfiable": "ScheduleAnyway"}]]),
    ] = ()
    """How evenly pods are spread."""
    hostAliases: Annotated[tuple[HostAlias, ...], Field(examples=[[{"ip": "10.0.0.1", "hostnames": ["store"]}]])] = ()
    """Further lines of /etc/hosts."""
    dnsPolicy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] | None = None
    """Where names are looked up. Default: in the cluster, also with `kubernetes.host_network`."""
    dnsConfig: Annotated[DnsConfig, Field(examples=[{"nameservers": ["10.0.0.2"]}])] | None = None
    """Further name servers, domains and options."""
    runtimeClassName: ObjectName | None = None
    """RuntimeClass that runs the containers."""
    schedulerName: ObjectName | None = None
    """Scheduler that places the pods. Default: Kubernetes' own."""
    preemptionPolicy: Literal["PreemptLowerPriority", "Never"] | None = None
    """Whether pods of lower priority must make room. Default: as the priority class says."""
    schedulingGates: Annotated[tuple[SchedulingGate, ...], Field(examples=[[{"name": "example.com/wait"}]])] = ()
    """What keeps the pods from being scheduled until somebody removes it."""
    readinessGates: Annotated[
        tuple[ReadinessGate, ...], Field(examples=[[{"conditionType": "example.com/checked"}]])
    ] = ()
    """Conditions that a pod must have to be ready."""
    resourceClaims: Annotated[
        tuple[ResourceClaim, ...], Field(examples=[[{"name": "gpu", "resourceClaimTemplateName": "gpu"}]])
    ] = ()
    """Claims on devices (dynamic resource allocation)."""
    activeDeadlineSeconds: PositiveInt | None = None
    """Seconds after which a pod is ended, whatever the job does. `timeouts.run_s` is that of the whole job."""
    shareProcessNamespace: bool | None = None
    """Whether containers of a pod see each other's processes."""
    hostPID: bool | None = None
    """Whether containers see all processes of the node."""
    hostIPC: bool | None = None
    """Whether they share memory with all processes of the node."""
    hostUsers: bool | None = None
    """False: numbers of users in the pod are others on the node."""
    enableServiceLinks: bool | None = None
    """Whether there is a variable for each Service of the namespace. Default: there is."""
    setHostnameAsFQDN: bool | None = None
    """Whether the host's name is the long one."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> TrainingPod:
        for field, names in (
            ("containers", [one.name for one in (*self.initContainers, *self.containers)]),
            ("volumes", [one.name for one in self.volumes]),
            ("resourceClaims", [one.name for one in self.resourceClaims]),
            ("schedulingGates", [one.name for one in self.schedulingGates]),
        ):
            if twice := _twice(names):
                raise ContradictionError(f"two of {field} are called {twice}; give each a name of its own", field)
        pairs = [(one.topologyKey, one.whenUnsatisfiable) for one in self.topologySpreadConstraints]
        if pair := _twice(pairs):
            message = f"two of topologySpreadConstraints are about {pair[0]} and {pair[1]}; keep one"
            raise ContradictionError(message, "topologySpreadConstraints")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> TrainingPod:
        if self.dnsPolicy == "None" and not (self.dnsConfig and self.dnsConfig.nameservers):
            raise ContradictionError("dnsPolicy: None needs dnsConfig.nameservers", "dnsPolicy")
        if self.hostPID and self.shareProcessNamespace:
            message = "shareProcessNamespace does not go with hostPID; keep one of the two"
            raise ContradictionError(message, "shareProcessNamespace")
        if self.hostUsers is False and (self.hostPID or self.hostIPC):
            raise ContradictionError("hostUsers: false does not go with hostPID or hostIPC; remove it", "hostUsers")
        return self


def _twice(names: Iterable[_T]) -> _T | None:
    seen: set[_T] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
