"""Types of names that occur in several sections of a spec. The patterns of the names are the rules of Kubernetes, Slurm
and SageMaker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# EnvName, LabelKey and LabelValue have descriptions, because no field documents the keys and values of a dictionary
EnvName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="letters, digits and underscores, not starting with a digit",
    ),
]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        description="a key as Kubernetes allows it, `team` or `example.com/team`",
    ),
]
LabelValue = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$",
        description="letters, digits, dashes, dots and underscores, at most 63 characters",
    ),
]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Name of a Kubernetes object: lower-case letters, digits, dashes and dots."""
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DnsLabel = Annotated[str, Field(pattern=DNS_LABEL)]
"""Name that becomes part of a host name: lower-case letters, digits and dashes, at most 63 characters."""
InstanceType = Annotated[str, Field(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9-]+$")]
"""SageMaker instance type, such as `ml.p5.48xlarge`."""
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00:]*$")]
"""Absolute path without colons, because a colon separates source and target of a mount."""


def stays_below(text: str) -> str:
    """Return `text`, after a check that the path has no `..`. For use as an AfterValidator."""
    if ".." in text.split("/"):
        raise ValueError(f"`{text}` leaves the volume by `..`; write a path without `..`")
    return text
