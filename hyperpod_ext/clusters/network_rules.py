"""Checks the section `infrastructure.network` of a cluster's spec, for a new or an existing network. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from hyperpod_ext.clusters.checks import groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import Infrastructure, Network
from hyperpod_ext.errors import Problem

_AT = "infrastructure.network"
_LARGEST, _SMALLEST = 16, 20
"""Allowed prefix lengths of a VPC's IP range. AWS allows no range larger than a /16. In a range smaller than a /20, the
quarter for one zone has too few addresses for machines with many interfaces."""


def network_problems(cluster: ClusterConfig, made: Infrastructure) -> Iterator[Problem]:
    """Yield a problem for every reason why the network in the section `made` is invalid."""
    network = made.network
    yield from (_new if network.vpc_id is None else _existing)(cluster, network)
    yield from _addresses(cluster, made)
    for index, one in enumerate(made.eks.public_access):
        yield from _cidr(one, f"infrastructure.eks.public_access.{index}")


def makes_eks(cluster: ClusterConfig) -> bool:
    """Return whether a deployment of `cluster` creates a new EKS cluster."""
    return cluster.orchestrator == "eks" and cluster.eks_cluster_arn is None


def zone_prefix(region: str) -> str:
    """Return the prefix of availability zone ids in `region`, such as `usw2` for us-west-2."""
    first, *middle, last = region.split("-")
    sides = ("north", "south", "east", "west", "central")
    letters = "".join(
        "".join(side[0] for side in sorted(sides, key=word.find) if side in word) or word[0] for word in middle
    )
    return f"{first}{letters}{last}"


def _new(cluster: ClusterConfig, network: Network) -> Iterator[Problem]:
    zones, example = network.zones, zone_prefix(cluster.region)
    if cluster.vpc is not None:
        hint = "remove vpc, or write infrastructure.network.vpc_id"
        yield Problem("is an existing network, but infrastructure creates a new one", path="vpc", hint=hint)
    if not zones:
        hint = f"write the zone of your capacity first: [{example}-az1, {example}-az2]"
        yield Problem("is required for a new network", path=f"{_AT}.zones", hint=hint)
    elif len(zones) < 2 and makes_eks(cluster):
        hint = f"add a zone: [{zones[0]}, ...]; machines stay in the first zone"
        yield Problem("EKS needs two zones", path=f"{_AT}.zones", hint=hint)
    if len(set(zones)) < len(zones):
        yield Problem("has a zone twice", path=f"{_AT}.zones", hint="list each zone once")
    if len({"-az" in zone for zone in zones}) > 1:
        yield Problem(
            "mixes ids and names", path=f"{_AT}.zones", hint=f"write ids for all zones, such as {example}-az1"
        )
    for index, zone in enumerate(zones):
        if not zone.startswith((f"{example}-az", cluster.region)):
            hint = f"zones of this region begin with {example}-az or {cluster.region}"
            yield Problem(f"`{zone}` is not in {cluster.region}", path=f"{_AT}.zones.{index}", hint=hint)
    groups = {group.name: group for _, group in groups_of(cluster)}
    for name, zone in network.group_zones.items():
        path = f"{_AT}.group_zones.{name}"
        if name not in groups:
            yield Problem("the cluster has no such group", path=path, hint=f"groups: {', '.join(groups)}")
        elif groups[name].vpc is not None:
            yield Problem(
                "the group has its own subnets", path=path, hint="remove either the zone or the group's subnets"
            )
        if zone not in zones:
            yield Problem(f"`{zone}` is not one of zones", path=path, hint=f"zones: {', '.join(zones) or 'none'}")
    if network.control_plane_subnets:
        hint = "remove it, or write vpc_id"
        yield Problem("is only valid for an existing network", path=f"{_AT}.control_plane_subnets", hint=hint)
    if network.nat == "none" and not network.private_endpoints:
        hint = "write private_endpoints: true, or another value of nat"
        message = "with neither NAT nor private endpoints, machines cannot reach AWS's services"
        yield Problem(message, path=f"{_AT}.nat", hint=hint)


def _existing(cluster: ClusterConfig, network: Network) -> Iterator[Problem]:
    if cluster.vpc is None:
        hint = "write the subnets and security groups of the machines in this network"
        yield Problem("is required with infrastructure.network.vpc_id", path="vpc", hint=hint)
    for field in ("zones", "group_zones"):
        if getattr(network, field):
            hint = "remove it, or vpc_id"
            yield Problem("is only valid for a new network", path=f"{_AT}.{field}", hint=hint)
    if makes_eks(cluster) and len(network.control_plane_subnets) < 2:
        hint = "write subnets in two or more zones, or eks_cluster_arn of an existing cluster"
        yield Problem("EKS needs two zones", path=f"{_AT}.control_plane_subnets", hint=hint)


def _addresses(cluster: ClusterConfig, made: Infrastructure) -> Iterator[Problem]:
    network = made.network
    used = {f"{_AT}.connected_cidrs.{index}": one for index, one in enumerate(network.connected_cidrs)}
    if makes_eks(cluster):
        used["infrastructure.eks.service_cidr"] = made.eks.service_cidr
    if network.vpc_id is None:
        used = {f"{_AT}.cidr": network.cidr} | used
    wrong = [problem for path, text in used.items() for problem in _cidr(text, path)]
    yield from wrong
    if wrong:
        return
    networks = {path: ipaddress.ip_network(text) for path, text in used.items()}
    own = networks.get(f"{_AT}.cidr")
    if own is not None and not _LARGEST <= own.prefixlen <= _SMALLEST:
        hint = f"write 10.192.0.0/{min(max(own.prefixlen, _LARGEST), _SMALLEST)}, or another range"
        yield Problem(f"must be a /{_LARGEST} to a /{_SMALLEST}", path=f"{_AT}.cidr", hint=hint)
    service = networks.get("infrastructure.eks.service_cidr")
    if service is not None and not (service.is_private and 12 <= service.prefixlen <= 24):
        hint = "write 172.20.0.0/16, or another private range"
        yield Problem("must be a private range, /12 to /24", path="infrastructure.eks.service_cidr", hint=hint)
    paths = list(networks)
    for first, one in enumerate(paths):
        for other in paths[first + 1 :]:
            if one.startswith(f"{_AT}.connected") and other.startswith(f"{_AT}.connected"):
                continue  # two connected networks may overlap each other, but not the cluster's network
            if networks[one].overlaps(networks[other]):
                message = f"{used[other]} overlaps {used[one]} of {one}"
                yield Problem(message, path=other, hint="choose another range for one of the two fields")


def _cidr(text: str, path: str) -> Iterator[Problem]:
    try:
        ipaddress.IPv4Network(text)
    except ValueError:
        try:
            right = str(ipaddress.IPv4Network(text, strict=False))
        except ValueError:
            yield Problem(f"`{text}` is not a range of IP addresses", path=path, hint="for example, 10.192.0.0/16")
            return
        one = f"{text.partition('/')[0]}/32 for one address, or " if ".public_access." in path else ""
        hint = f"write {one}{right}{' for the whole range' if one else ''}"
        yield Problem(f"`{text}` does not begin at the start of its range", path=path, hint=hint)
