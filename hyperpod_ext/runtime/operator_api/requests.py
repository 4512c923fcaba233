"""Bodies of the operator's calls. As lenient as AWS's agent: `"1"` is a number, unknown fields are passed over."""

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
    """One line of the table of addresses."""

    rank: int
    ip: str


class Ranks(BaseModel):
    """Which node this pod is, and where the others are: body of `/update`."""

    rank: int
    """Number of the node; from `nnodes` on, a spare's."""
    nnodes: int
    faultCount: int  # noqa: N815  (the operator's word)
    """Faults of the job so far, as the operator counts them."""
    master_addr: Annotated[str, AfterValidator(_known_host)]
    master_port: Annotated[int, BeforeValidator(_port)]
    log_monitoring_configuration: list[dict[str, Any]] | None = None
    ipVersion: str | None = None  # noqa: N815
    """Names one state of the table of addresses."""
    rankIps: list[RankAddress] | None = None  # noqa: N815
    """Addresses of nodes: all of them at first, then those that have changed."""
    worker_data: Any = None
    spare: Annotated[bool, BeforeValidator(_flag)] = False


class Start(Ranks):
    """Body of `/start`."""

    progress: dict[str, Any] = Field(default_factory=dict)


class Stop(BaseModel):
    """Body of `/stop`."""

    restart_mode: str | None = "ipr"
    is_graceful: bool | None = None
    timeout: int | None = None
    """Seconds that workers have to end by themselves."""


def mistakes(error: ValidationError) -> list[dict[str, Any]]:
    """What is wrong with a body, in the words of a 422."""
    return [
        {"type": each["type"], "loc": ["body", *each["loc"]], "msg": each["msg"]}
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def is_address(text: str) -> bool:
    """Whether it is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
