"""Estimates the cost of a cluster per hour, both as it is deployed and with all machines of the cluster's file.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_ext.catalog.prices import Price, by_use, is_free, lustre_price, machine_price, resource_price, sources
from hyperpod_ext.clusters.cdk.assembly import Assembly
from hyperpod_ext.clusters.cdk.changes import CLUSTER
from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup

_LUSTRE = "AWS::FSx::FileSystem"
_ENDPOINT = "AWS::EC2::VPCEndpoint"


@dataclass(frozen=True, slots=True)
class CostItem:
    """A kind of resource with a price per hour."""

    what: str
    price: Price | None
    """Price of one resource per hour. None: unknown."""
    now: int
    """Number of resources in the templates that will be deployed."""
    scaled: int
    """Number of resources if the cluster is deployed with `--scale`, which starts all machines."""
    note: str = ""
    """Reason why the price is unknown, or costs that the price does not include."""

    def to_json(self) -> dict[str, Any]:
        """Return the item as JSON."""
        each = self.price.usd if self.price else None
        return asdict(self) | {
            "usd_now": None if each is None else each * self.now,
            "usd_scaled": None if each is None else each * self.scaled,
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated costs of a cluster per hour, and the resources for which AWS charges by use."""

    region: str
    items: tuple[CostItem, ...]
    by_use: tuple[tuple[str, str], ...]
    """CloudFormation types for which AWS charges by use, each with the unit of use."""

    @property
    def now(self) -> float:
        """US dollars per hour for the deployed resources. The sum excludes items without a price."""
        return sum(line.price.usd * line.now for line in self.items if line.price)

    @property
    def scaled(self) -> float:
        """US dollars per hour if the cluster is deployed with `--scale`. The sum excludes items without a price."""
        return sum(line.price.usd * line.scaled for line in self.items if line.price)

    @property
    def unknown(self) -> tuple[CostItem, ...]:
        """Items without a price, which the sums `now` and `scaled` do not include."""
        return tuple(line for line in self.items if line.price is None)

    @property
    def dated(self) -> tuple[str, str] | None:
        """Dates of the oldest and the newest price of the estimate; None for an estimate without prices."""
        days = sorted(line.price.dated for line in self.items if line.price)
        return (days[0], days[-1]) if days else None

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON."""
        used = {line.price.source for line in self.items if line.price}
        return {
            "currency": "USD",
            "region": self.region,
            "usd_an_hour_now": round(self.now, 4),
            "usd_an_hour_scaled": round(self.scaled, 4),
            "unknown": [line.what for line in self.unknown],
            "by_use": dict(self.by_use),
            "lines": [line.to_json() for line in self.items],
            "sources": {name: asdict(source) for name, source in sources().items() if name in used},
        }


def estimate(cluster: ClusterConfig, assembly: Assembly) -> Estimate:
    """Return the estimated cost per hour of `cluster` with all resources in `assembly`."""
    region = cluster.region
    counts = _counts(assembly)
    lines = [*_machines(cluster, counts), *_around(assembly, region)]
    kinds = {resource["Type"] for stack in assembly.stacks for resource in stack.resources.values()}
    used = tuple((kind, how) for kind in sorted(kinds) if (how := by_use(kind)))
    return Estimate(region, tuple(lines), used)


def _counts(assembly: Assembly) -> dict[str, int]:
    """Return the number of machines that the templates give to each group, by the group's name."""
    found = {}
    for _stack, properties in assembly.of_kind(CLUSTER):
        for member in ("InstanceGroups", "RestrictedInstanceGroups"):
            for group in properties.get(member, []):
                found[group["InstanceGroupName"]] = int(group["InstanceCount"])
    return found


def _machines(cluster: ClusterConfig, counts: dict[str, int]) -> Iterator[CostItem]:
    groups: tuple[InstanceGroup | RestrictedGroup, ...] = (*cluster.instance_groups, *cluster.restricted_groups)
    for group in groups:
        what, now = f"{group.instance_type}, group {group.name}", counts.get(group.name, 0)
        price, note = machine_price(group.instance_type, cluster.region), ""
        if price is None:
            note = f"the price of {group.instance_type} in {cluster.region} is unknown"
        if group.training_plan:
            price, note = None, "paid with its training plan"
        elif isinstance(group, InstanceGroup) and group.capacity == "spot":
            price, note = None, "the price of spot machines varies"
        elif isinstance(group, InstanceGroup) and group.other_types and price:
            note = f"or {', '.join(group.other_types)}, at another price"
        yield CostItem(what, price, now, group.count, note)
        gib = sum(disk.size_gib or 0 for disk in group.storage if disk.kind == "ebs")
        if gib:
            yield CostItem(f"{gib} GiB of EBS, group {group.name}", None, now, group.count, "its price is unknown")


def _around(assembly: Assembly, region: str) -> Iterator[CostItem]:
    found: dict[str, int] = {}
    for stack in assembly.stacks:
        for resource in stack.resources.values():
            kind, properties = resource["Type"], resource.get("Properties", {})
            if kind == CLUSTER or is_free(kind) or by_use(kind):
                continue
            if kind == _LUSTRE:
                yield _lustre(properties, region)
            elif kind == _ENDPOINT:
                if properties.get("VpcEndpointType") == "Interface":
                    found[kind] = found.get(kind, 0) + len(properties.get("SubnetIds", []) or [None])
            else:
                found[kind] = found.get(kind, 0) + 1
    for kind, count in sorted(found.items()):
        price = resource_price(kind, region)
        note = "" if price else f"its price in {region} is unknown"
        yield CostItem(_WORDS.get(kind, kind), price, count, count, note or _LEFT_OUT.get(kind, ""))


def _lustre(properties: Any, region: str) -> CostItem:
    gib = int(properties["StorageCapacity"])
    asked = properties.get("LustreConfiguration", {})
    throughput, deployment = asked.get("PerUnitStorageThroughput"), asked.get("DeploymentType")
    price = lustre_price(gib, int(throughput), region) if throughput and deployment == "PERSISTENT_2" else None
    note = "backups are paid by use" if price else f"its price in {region} is unknown"
    return CostItem(f"FSx for Lustre, {gib} GiB at {throughput} MB/s/TiB", price, 1, 1, note)


_WORDS = {
    "AWS::EC2::NatGateway": "NAT gateways",
    "AWS::EC2::EIP": "public IPv4 addresses",
    "AWS::EC2::VPCEndpoint": "interface endpoints, in each subnet",
    "AWS::EKS::Cluster": "EKS control plane",
    "AWS::KMS::Key": "KMS keys",
}
_LEFT_OUT = {
    "AWS::EC2::NatGateway": "plus the traffic, per GB",
    "AWS::EC2::VPCEndpoint": "plus the traffic, per GB",
    "AWS::EKS::Cluster": "standard support; extended support costs six times as much",
    "AWS::KMS::Key": "and requests",
}
