"""Bodies of the operator's requests, parsed as leniently as by AWS's agent: `"1"` is a number, unknown fields are
ignored."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError


def _known_host(host: str) -> str:
    if not host:
        raise ValueError("Empty master_addr received from operator")
    return host


def _port(port: Any) -> Any:
    return 0 if port == "" else port


def _flag(number: Any) -> Any:
    return bool(number) if isinstance(number, int) else number


class RankAddress(BaseModel):
    """One row of the operator's table of node addresses."""

    rank: int
    ip: str


class Ranks(BaseModel):
    """Body of `/update`: this pod's node number, and the addresses of nodes."""

    rank: int
    """Number of this pod's node. A spare has a number from `nnodes` on."""
    nnodes: int
    faultCount: int  # noqa: N815  (the operator uses this name)
    """Number of faults that the operator has counted in this job so far."""
    master_addr: Annotated[str, AfterValidator(_known_host)]
    master_port: Annotated[int, BeforeValidator(_port)]
    log_monitoring_configuration: list[dict[str, Any]] | None = None
    ipVersion: str | None = None  # noqa: N815
    """Version of the operator's table of addresses. The pod returns this version in `/status`."""
    rankIps: list[RankAddress] | None = None  # noqa: N815
    """Addresses of nodes. The first request has all addresses, later requests only changed ones."""
    worker_data: Any = None
    spare: Annotated[bool, BeforeValidator(_flag)] = False


class Start(Ranks):
    """Body of `/start`: the fields of `/update`, and the progress of the job."""

    progress: dict[str, Any] = Field(default_factory=dict)


class Stop(BaseModel):
    """Body of `/stop`: how to stop training."""

    restart_mode: str | None = "ipr"
    is_graceful: bool | None = None
    timeout: int | None = None
    """Time in seconds within which workers may finish on their own."""


def mistakes(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors in a request's body, as the details of a 422 response."""
    return [
        {"type": each["type"], "loc": ["body", *each["loc"]], "msg": each["msg"]}
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def is_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
