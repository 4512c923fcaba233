"""What Kubernetes asks a container while it runs, and runs in it at its start and end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.words import PortNumber, PortOrName, Seconds, exactly_one


class Exec(PodPart):
    """A command in the container."""

    command: Annotated[tuple[str, ...], Field(min_length=1, examples=[["true"]])]
    """Its words; no shell reads them. Exit code 0 is well."""


class HttpHeader(PodPart):
    """One header of a request."""

    name: Annotated[str, Field(pattern=r"^[-!#$%&'*+.^_`|~0-9A-Za-z]+$", examples=["Accept"])]
    """Name of the header."""
    value: Annotated[str, Field(examples=["text/plain"])]
    """Its value."""


class HttpGet(PodPart):
    """A request by HTTP; an answer from 200 to 399 is well."""

    port: PortOrName
    """Where the container listens."""
    path: str | None = None
    """Path of the request. Default: `/`."""
    host: str | None = None
    """Host to connect to. Default: the pod's own address."""
    scheme: Literal["HTTP", "HTTPS"] | None = None
    """Default: HTTP."""
    httpHeaders: tuple[HttpHeader, ...] = ()
    """Further headers."""


class TcpSocket(PodPart):
    """A connection, which is well if it can be opened."""

    port: PortOrName
    """Where the container listens."""
    host: str | None = None
    """Host to connect to. Default: the pod's own address."""


class Grpc(PodPart):
    """A request to gRPC's health service."""

    port: Annotated[PortNumber, Field(examples=[9000])]
    """Where it listens: a number."""
    service: str | None = None
    """Which service of it."""


class Sleep(PodPart):
    """A pause."""

    seconds: Annotated[NonNegativeInt, Field(examples=[5])]
    """How long."""


class Handler(PodPart):
    """What is done at the start or end of a container: one of these."""

    exec: Exec | None = None
    """A command in the container."""
    httpGet: HttpGet | None = None
    """A request by HTTP."""
    sleep: Sleep | None = None
    """A pause."""
    tcpSocket: TcpSocket | None = None
    """Kubernetes takes it and does nothing."""

    @model_validator(mode="after")
    def _one(self) -> Handler:
        exactly_one(self, "a handler")
        return self


class Lifecycle(PodPart):
    """What is done at the start and at the end of a container."""

    postStart: Handler | None = None
    """Right after the container has started, beside its own process; if it fails, the container is ended."""
    preStop: Handler | None = None
    """Before SIGTERM; it takes of the time that the pod has to end."""


class Probe(PodPart):
    """A question that is asked again and again; one way to ask it, and how often."""

    exec: Exec | None = None
    """A command in the container."""
    httpGet: HttpGet | None = None
    """A request by HTTP."""
    tcpSocket: TcpSocket | None = None
    """A connection."""
    grpc: Grpc | None = None
    """A request to gRPC's health service."""
    initialDelaySeconds: NonNegativeInt | None = None
    """Seconds before the first. Default: 0."""
    periodSeconds: Seconds | None = None
    """Seconds from one to the next. Default: 10."""
    timeoutSeconds: Seconds | None = None
    """Seconds after which no answer is a bad one. Default: 1."""
    failureThreshold: PositiveInt | None = None
    """Bad answers in a row that count. Default: 3."""
    successThreshold: PositiveInt | None = None
    """Good answers in a row that count, for a readinessProbe. Default: 1."""
    terminationGracePeriodSeconds: Seconds | None = None
    """Seconds from SIGTERM to SIGKILL after bad answers. Default: as for the pod."""

    @model_validator(mode="after")
    def _one(self) -> Probe:
        exactly_one(self, "a probe", "exec", "httpGet", "tcpSocket", "grpc")
        return self
