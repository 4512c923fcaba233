"""Divides a range of addresses among zones. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ZonePlan:
    """The subnets of one zone, as CIDRs."""

    zone: str
    machines: str
    """Subnet of machines: a quarter of all addresses, because a machine with many interfaces needs dozens."""
    control: str
    """Subnet of the EKS control plane's interfaces, and of endpoints."""
    public: str
    """Subnet of the gateway to the internet, and of nothing else."""


def plan_subnets(cidr: str, zones: Sequence[str]) -> list[ZonePlan]:
    """Divide `cidr`: a quarter for the machines of each of up to three zones, sixteenths of the last for the rest.

    A zone's ranges depend only on its index, so appending a zone moves no other zone's ranges.
    """
    *quarters, rest = ipaddress.ip_network(cidr).subnets(prefixlen_diff=2)
    small = list(rest.subnets(prefixlen_diff=4))
    return [
        ZonePlan(zone, machines=str(quarters[place]), control=str(small[4 + place]), public=str(small[place]))
        for place, zone in enumerate(zones)
    ]
