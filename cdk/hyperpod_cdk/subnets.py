"""Divides the IP range of a VPC into subnets for each availability zone. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ZonePlan:
    """IP ranges of the subnets in one availability zone, in CIDR notation."""

    zone: str
    machines: str
    """Range of the subnet for machines: a quarter of the VPC's range, because a machine with many interfaces needs
    dozens of IP addresses."""
    control: str
    """Range of the subnet for network interfaces of the EKS control plane and of VPC endpoints."""
    public: str
    """Range of the public subnet, which contains only the NAT gateway."""


def plan_subnets(cidr: str, zones: Sequence[str]) -> list[ZonePlan]:
    """Divide the range `cidr` among up to three availability zones.

    Each zone gets a quarter of `cidr`, for the machines of the zone. The last quarter is divided into sixteen small
    ranges for the other subnets. The ranges of a zone depend only on the zone's index, so appending a zone does not
    change the ranges of other zones.
    """
    *quarters, rest = ipaddress.ip_network(cidr).subnets(prefixlen_diff=2)
    small = list(rest.subnets(prefixlen_diff=4))
    return [
        ZonePlan(zone, machines=str(quarters[place]), control=str(small[4 + place]), public=str(small[place]))
        for place, zone in enumerate(zones)
    ]
