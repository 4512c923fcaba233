"""Containers: what the one that trains can be told besides, and those beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.mounts import Device, Mount
from hyperpod_ext.config.job.pods.probes import Lifecycle, Probe
from hyperpod_ext.config.job.pods.security import ContainerSecurity, SideContainerSecurity
from hyperpod_ext.config.job.pods.variables import ReferredVariable, Variable, VariableSource
from hyperpod_ext.config.job.pods.words import Amount, PortNumber, size_of
from hyperpod_ext.config.names import AbsolutePath, DnsLabel, LabelKey

PortName = Annotated[str, Field(pattern=r"^([a-z0-9]+-)*[a-z0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$", max_length=15)]
_EXEC = {"exec": {"command": ["true"]}}


class Port(PodPart):
    """A port that a container listens on."""

    containerPort: Annotated[PortNumber, Field(examples=[8000])]
    """Its number."""
    name: PortName | None = None
    """Its name: lower-case letters, digits and dashes, at most 15."""
    protocol: Literal["TCP", "UDP", "SCTP"] | None = None
    """Default: TCP."""
    hostPort: PortNumber | None = None
    """Number on the node, of which only one pod can have it."""
    hostIP: str | None = None
    """Address of the node, for hostPort."""


class ClaimUse(PodPart):
    """A claim of the pod on a device, that this container uses."""

    name: Annotated[DnsLabel, Field(examples=["gpu"])]
    """Name of the claim, in `resourceClaims` of the pod."""
    request: DnsLabel | None = None
    """Only this request of the claim."""


class Limits(PodPart):
    """What the container that trains takes, besides `resources`."""

    limits: dict[LabelKey, Amount] = {}
    """Most that it may take of CPU and memory, which `resources` only asks for; and extended resources: so many."""
    claims: tuple[ClaimUse, ...] = ()
    """Claims on devices that it uses."""


class Requirements(PodPart):
    """What a container beside the one that trains takes."""

    requests: dict[LabelKey, Amount] = {}
    """What it asks for."""
    limits: dict[LabelKey, Amount] = {}
    """Most that it may take."""
    claims: tuple[ClaimUse, ...] = ()
    """Claims on devices that it uses."""

    @model_validator(mode="after")
    def _within(self) -> Requirements:
        for name, asked in self.requests.items():
            if name in self.limits and size_of(asked) > size_of(self.limits[name]):
                raise ContradictionError(f"asks for {asked} of {name}, and may take {self.limits[name]}", "requests")
        return self


class ResizeRule(PodPart):
    """What a change of a resource means to a container that runs."""

    resourceName: Annotated[Literal["cpu", "memory"], Field(examples=["cpu"])]
    """Which resource."""
    restartPolicy: Annotated[Literal["NotRequired", "RestartContainer"], Field(examples=["NotRequired"])]
    """Whether it is started anew."""


class OfContainer(PodPart):
    """What every container of a job can be told."""

    envFrom: Annotated[tuple[VariableSource, ...], Field(examples=[[{"configMapRef": {"name": "settings"}}]])] = ()
    """ConfigMaps and Secrets whose keys become variables."""
    ports: Annotated[tuple[Port, ...], Field(examples=[[{"containerPort": 8000, "name": "http"}]])] = ()
    """Ports that it listens on, besides the job's own."""
    lifecycle: Annotated[Lifecycle, Field(examples=[{"preStop": _EXEC}])] | None = None
    """What is done at its start and end."""
    livenessProbe: Annotated[Probe, Field(examples=[_EXEC | {"periodSeconds": 60}])] | None = None
    """A question; bad answers end the container. Our runtime finds hangs by itself: `restart.hang`."""
    readinessProbe: Annotated[Probe, Field(examples=[_EXEC])] | None = None
    """A question; bad answers take the pod out of Services."""
    startupProbe: Annotated[Probe, Field(examples=[_EXEC])] | None = None
    """A question before all others; bad answers end the container."""
    volumeMounts: Annotated[tuple[Mount, ...], Field(examples=[[{"name": "work", "mountPath": "/work"}]])] = ()
    """Where it sees the volumes of `kubernetes.pod.volumes`."""
    volumeDevices: Annotated[tuple[Device, ...], Field(examples=[[{"name": "work", "devicePath": "/dev/xvda"}]])] = ()
    """Claims without a file system, as devices."""
    resizePolicy: Annotated[
        tuple[ResizeRule, ...], Field(examples=[[{"resourceName": "cpu", "restartPolicy": "NotRequired"}]])
    ] = ()
    """What a change of its resources means."""
    stdin: bool | None = None
    """Whether its standard input stays open."""
    stdinOnce: bool | None = None
    """Whether that is closed after the first who attached has gone."""
    tty: bool | None = None
    """Whether it has a terminal."""
    terminationMessagePath: AbsolutePath | None = None
    """File with its last words. Default: /dev/termination-log."""
    terminationMessagePolicy: Literal["File", "FallbackToLogsOnError"] | None = None
    """Whether the end of its log does where that file is empty."""

    @model_validator(mode="after")
    def _probes_fit(self) -> OfContainer:
        for name in ("livenessProbe", "startupProbe"):
            probe: Probe | None = getattr(self, name)
            if probe is not None and probe.successThreshold not in (None, 1):
                raise ContradictionError(f"successThreshold of a {name} is 1; remove it", name)
        if self.readinessProbe is not None and self.readinessProbe.terminationGracePeriodSeconds is not None:
            message = "a readinessProbe ends nothing; remove its terminationGracePeriodSeconds"
            raise ContradictionError(message, "readinessProbe")
        return self

    @model_validator(mode="after")
    def _places_are_apart(self) -> OfContainer:
        places = [one.mountPath.rstrip("/") for one in self.volumeMounts]
        if place := next((one for one in places if places.count(one) > 1), None):
            raise ContradictionError(f"two mounts are at {place}; give each a path of its own", "volumeMounts")
        return self

    @model_validator(mode="after")
    def _ports_are_there(self) -> OfContainer:
        names = [port.name for port in self.ports if port.name is not None]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ContradictionError(f"two ports are called {twice}; give each a name of its own", "ports")
        handlers = [self.livenessProbe, self.readinessProbe, self.startupProbe]
        life = self.lifecycle
        for one in (*handlers, *((life.postStart, life.preStop) if life else ())):
            asked = (one.httpGet or one.tcpSocket) if one is not None else None
            if asked is not None and isinstance(asked.port, str) and asked.port not in names:
                raise ContradictionError(f"port `{asked.port}` is asked, and no port of the container is called so")
        return self


class TrainingContainer(OfContainer):
    """The container that trains, besides what the spec has fields of its own for."""

    env: Annotated[
        tuple[ReferredVariable, ...],
        Field(examples=[[{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]]),
    ] = ()
    """Variables whose values lie elsewhere; those with values are in `env` of the job."""
    resources: Annotated[Limits, Field(examples=[{"limits": {"memory": "1800Gi"}}])] | None = None
    """Limits, and claims on devices."""
    securityContext: Annotated[ContainerSecurity, Field(examples=[{"runAsGroup": 1000}])] | None = None
    """As whom it runs, and what it may do."""


class Named(PodPart):
    """What a container beside the one that trains must say."""

    name: Annotated[DnsLabel, Field(examples=["fetch"])]
    """Its name, unique in the pod."""
    image: Annotated[str, Field(min_length=1, examples=["repo/fetch:1"])]
    """Its image."""


class SideContainer(OfContainer, Named):
    """A container beside the one that trains."""

    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node fetches the image."""
    command: tuple[str, ...] = ()
    """What runs in it. Default: what the image says."""
    args: tuple[str, ...] = ()
    """Arguments of that."""
    workingDir: str | None = None
    """Folder that it starts in."""
    env: tuple[Variable, ...] = ()
    """Its variables."""
    resources: Requirements | None = None
    """What it takes."""
    securityContext: SideContainerSecurity | None = None
    """As whom it runs, and what it may do."""


class InitContainer(SideContainer):
    """A container that runs before the one that trains; or, started anew whenever it ends, beside it."""

    restartPolicy: Literal["Always"] | None = None
    """`Always`: a sidecar, which starts before the one that trains and ends after it."""

    @model_validator(mode="after")
    def _probes_go_with_sidecars(self) -> InitContainer:
        for name in ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"):
            if self.restartPolicy is None and getattr(self, name) is not None:
                message = f"{name} goes with restartPolicy: Always alone; write that, or remove it"
                raise ContradictionError(message, name)
        return self
