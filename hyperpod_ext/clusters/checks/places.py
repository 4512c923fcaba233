"""Checks of the availability zones of machines, file systems and training plans, and of the machines' IP addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.catalog.zones import zones_dated, zones_with
from hyperpod_ext.clusters.checks import Group, check, groups_of
from hyperpod_ext.config.clusters.account import AccountFacts
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem

_POD_ADDRESSES = 49
"""Number of IP addresses for pods that a machine on EKS has on its primary interface. AWS's public repository
agent-plugins counts 81 addresses for ml.p5.48xlarge (2026-11): one for each of 32 interfaces, and 49 for pods. For p4d
machines, agent-plugins counts two IP addresses fewer."""
_RESERVED = 5
"""Number of IP addresses that AWS reserves in every subnet."""


def machine_addresses(cluster: ClusterConfig, group: Group) -> int:
    """Return the number of IP addresses that one machine of the group needs in its subnet."""
    machine = instance(group.instance_type)
    interfaces = (machine.efa if machine else None) or 1
    if getattr(group, "network_interface", None) == "efa-only":
        interfaces = 1
    pods = _POD_ADDRESSES if cluster.orchestrator == "eks" and machine and machine.accelerators and machine.efa else 0
    return interfaces + pods


@check(
    "HPX211",
    "error",
    "a subnet with too few addresses",
    "Each EFA interface of a machine needs an IP address, and on EKS the pods of a machine need 49 more. AWS starts "
    "machines for which there is no address, and then gives up on them. Subnets cannot grow.",
    "Use a larger subnet, several subnets, network_interface: efa-only, or fewer machines.",
)
def subnets_have_room(cluster: ClusterConfig) -> Iterator[Problem]:
    together: dict[tuple[str, ...], list[tuple[str, Group]]] = {}
    for path, group in groups_of(cluster):
        together.setdefault(_places(cluster, group), []).append((path, group))
    for places, groups in together.items():
        free = _free_addresses(cluster, places)
        needs = [(group.count * machine_addresses(cluster, group), path, group) for path, group in groups]
        total = sum(need for need, *_ in needs)
        if free is None or total <= free:
            continue
        largest, path, group = max(needs, key=lambda one: one[0])
        fits = max(free - (total - largest), 0) // machine_addresses(cluster, group)
        less = f"write at most {fits}, or " if fits else ""
        is_new = cluster.infrastructure is not None and set(places) <= set(cluster.infrastructure.network.zones)
        subnets = f"the subnet in {places[0]}" if is_new else " and ".join(places)
        message = f"the machines need {total} IP addresses, but {subnets} {'have' if places[1:] else 'has'} {free}"
        machine = instance(group.instance_type)
        efa = getattr(group, "network_interface", "efa-only") is None and machine is not None and (machine.efa or 1) > 1
        hint = f"{less}use {'a larger infrastructure.network.cidr' if is_new else 'a larger subnet'}"
        hint += ", or write network_interface: efa-only" if efa else ""
        yield Problem(message, path=f"{path}.count", hint=hint)


@check(
    "HPX212",
    "error",
    "a zone without machines of the type",
    "EC2 offers the instance type in other zones of the region, but not in the group's zone. The group would wait for "
    "capacity, and fail. Source: EC2's API, on the date in `catalog/zones.json`.",
    "Put the group into a zone that has the instance type. If AWS has added the type, use --ignore HPX212.",
)
def zones_have_the_machines(cluster: ClusterConfig) -> Iterator[Problem]:
    for path, group in groups_of(cluster):
        there, zones = zones_with(group.instance_type, cluster.region), group_zones(cluster, group)
        if not there or not zones or not all("-az" in zone for zone in zones) or set(there) & set(zones):
            continue
        message = f"{group.instance_type} was not offered in {' or '.join(zones)} on {zones_dated()}"
        yield Problem(message, path=f"{path}.instance_type", hint=f"zones with this type: {', '.join(there)}")


@check(
    "HPX213",
    "error",
    "a group with EFA over several zones",
    "EFA does not work between zones. Machines in another zone train over plain TCP or not at all, and traffic "
    "between zones costs money.",
    "Give the group subnets of one zone, and make a separate group for each zone.",
)
def efa_stays_in_a_zone(cluster: ClusterConfig) -> Iterator[Problem]:
    for path, group in groups_of(cluster):
        zones = group_zones(cluster, group)
        if len(zones) > 1 and _has_efa(group) and group.count > 1:
            where = f"{path}.vpc.subnets" if group.vpc else "vpc.subnets"
            message = (
                f"machines of group {group.name} may be in {' and '.join(zones)}, but EFA works only within a zone"
            )
            yield Problem(message, path=where, hint="use only subnets of one zone")


@check(
    "HPX214",
    "error",
    "a training plan with other machines, or in another zone",
    "A training plan has a number of machines of one type in one zone. A group with another type or zone gets no "
    "machines from the plan, and the plan costs money anyway.",
    "Use the plan's type, zone and number of machines.",
)
def plans_are_what_the_group_wants(cluster: ClusterConfig) -> Iterator[Problem]:
    used: dict[str, int] = {}
    for path, group in groups_of(cluster):
        plan = _facts(cluster).training_plans.get(group.training_plan or "")
        if plan is None or group.training_plan is None:
            continue
        zones = group_zones(cluster, group)
        used[group.training_plan] = used.get(group.training_plan, 0) + group.count
        if plan.instance_type != group.instance_type:
            message = f"the plan has {plan.instance_type}, but the group has {group.instance_type}"
            yield Problem(message, path=f"{path}.training_plan", hint=f"write instance_type: {plan.instance_type}")
        elif plan.zone is not None and zones and plan.zone not in zones:
            message = f"the plan's machines are in {plan.zone}, but the group is in {' and '.join(zones)}"
            yield Problem(message, path=f"{path}.training_plan", hint=f"use a subnet in {plan.zone}")
        elif plan.count is not None and used[group.training_plan] > plan.count:
            message = f"the plan has {plan.count} machines, but its groups together need {used[group.training_plan]}"
            hint = f"reduce count, so that all groups of the plan together have at most {plan.count} machines"
            yield Problem(message, path=f"{path}.count", hint=hint)


@check(
    "HPX215",
    "error",
    "a file system in another zone than the machines",
    "Machines read and write all data in another zone, which is slower and costs money in both directions.",
    "Put machines and file system into one zone. If you want different zones, use --ignore HPX215.",
)
def file_systems_are_near(cluster: ClusterConfig) -> Iterator[Problem]:
    made = cluster.infrastructure
    for path, group in groups_of(cluster):
        zones, machine = group_zones(cluster, group), instance(group.instance_type)
        if not zones or machine is None or not machine.accelerators:
            continue
        near = f"the machines of group {group.name} are in {' and '.join(zones)}"
        for index, storage in enumerate(group.storage):
            zone = None if storage.kind == "ebs" else _facts(cluster).file_systems.get(storage.dns_name.split(".")[0])
            if zone is not None and zone not in zones:
                hint = f"use a file system in {zones[0]}, or subnets in {zone}"
                where = f"{path}.storage.{index}.dns_name"
                yield Problem(f"the file system is in {zone}, but {near}", path=where, hint=hint)
        # check only Slurm, where all nodes mount the new file system; on EKS, each job chooses whether to mount it
        own = (
            cluster.orchestrator == "slurm"
            and made is not None
            and made.file_system is not None
            and made.network.vpc_id is None
        )
        if own and made is not None and made.network.zones and made.network.zones[0] not in zones:
            where = f"infrastructure.network.group_zones.{group.name}"
            message = f"the file system is created in {made.network.zones[0]}, but {near}"
            yield Problem(
                message, path=where, hint="put the group's zone first in zones, or remove it from group_zones"
            )


@check(
    "HPX216",
    "warning",
    "more machines than the quota",
    "SageMaker refuses machines beyond the account's quota for clusters. An increase takes days.",
    "Request an increase with the quota's code (`aws service-quotas request-service-quota-increase`) before you "
    "create the cluster.",
)
def quotas_are_enough(cluster: ClusterConfig) -> Iterator[Problem]:
    wanted: dict[str, int] = {}
    for path, group in groups_of(cluster):
        wanted[group.instance_type] = wanted.get(group.instance_type, 0) + group.count
        quota = _facts(cluster).quotas.get(group.instance_type)
        if quota is not None and wanted[group.instance_type] > quota.machines:
            code = f" ({quota.code})" if quota.code else ""
            name = f"`{group.instance_type} for cluster usage`{code}"
            message = f"the cluster needs {wanted[group.instance_type]} machines, but quota {name} is {quota.machines}"
            yield Problem(message, path=f"{path}.count", hint="request an increase of the quota first")


def group_zones(cluster: ClusterConfig, group: Group) -> tuple[str, ...]:
    """Return the availability zones in which the group's machines may be; empty if a zone is unknown."""
    subnets = _facts(cluster).subnets
    places = _places(cluster, group)
    if all(place in subnets for place in places):
        return tuple(sorted({subnets[place].zone for place in places}))
    made = cluster.infrastructure
    return places if made is not None and made.network.vpc_id is None and set(places) <= set(made.network.zones) else ()


def _places(cluster: ClusterConfig, group: Group) -> tuple[str, ...]:
    """Return the ids of the group's subnets; if the deployment creates the network, return the group's availability
    zone."""
    network, made = group.vpc or cluster.vpc, cluster.infrastructure
    if network is not None:
        return tuple(sorted(network.subnets))
    if made is None or not made.network.zones:
        return ()
    return (made.network.group_zones.get(group.name, made.network.zones[0]),)


def _free_addresses(cluster: ClusterConfig, places: tuple[str, ...]) -> int | None:
    """Return the total number of free IP addresses in `places`, which are subnets or one availability zone of a new
    network; None if unknown."""
    made, facts = cluster.infrastructure, _facts(cluster)
    if made is not None and places and set(places) <= set(made.network.zones):
        try:
            return ipaddress.ip_network(made.network.cidr).num_addresses // 4 - _RESERVED
        except ValueError:
            return None  # the IP range is invalid, which network_rules reports
    free = [facts.subnets[place].free_addresses if place in facts.subnets else None for place in places]
    known = [one for one in free if one is not None]
    return sum(known) if free and len(known) == len(free) else None


def _has_efa(group: Group) -> bool:
    machine = instance(group.instance_type)
    return machine is not None and machine.efa != 0  # an unknown number of EFA interfaces (None) counts as EFA


def _facts(cluster: ClusterConfig) -> AccountFacts:
    return cluster.account or AccountFacts()
