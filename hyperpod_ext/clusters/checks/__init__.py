"""Checks of a cluster that is right field by field, and would cost money without training anything.

Each has an id, HPX201 and up, which `hp-ext explain` knows and `--ignore` takes. Checks are pure functions of a
ClusterConfig; docs/clusters.md lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup
from hyperpod_ext.errors import Problem

Severity = Literal["error", "warning"]
Group = InstanceGroup | RestrictedGroup
_MODULES = ("capacity", "places", "regions", "set_up", "uses")


@dataclass(frozen=True, slots=True)
class ClusterCheck:
    """One thing that can be wrong."""

    id: str
    severity: Severity
    title: str
    """What is wrong, as a short sentence."""
    cause: str
    """What would happen, and why."""
    fix: str
    """What to do."""
    find: Callable[[ClusterConfig], Iterator[Problem]]


CHECKS: dict[str, ClusterCheck] = {}
"""All checks by id, once `all_checks` was called."""


def check(
    id: str, severity: Severity, title: str, cause: str, fix: str
) -> Callable[[Callable[[ClusterConfig], Iterator[Problem]]], Callable[[ClusterConfig], Iterator[Problem]]]:
    """Enters a function as the check `id`."""

    def enter(find: Callable[[ClusterConfig], Iterator[Problem]]) -> Callable[[ClusterConfig], Iterator[Problem]]:
        if id in CHECKS and CHECKS[id].find.__qualname__ != find.__qualname__:
            raise ValueError(f"two checks are called {id}")
        CHECKS[id] = ClusterCheck(id, severity, title, cause, fix, find)
        return find

    return enter


def all_checks() -> dict[str, ClusterCheck]:
    """Every check, by id."""
    for name in _MODULES:
        importlib.import_module(f"hyperpod_ext.clusters.checks.{name}")
    return dict(sorted(CHECKS.items()))


def findings(cluster: ClusterConfig, severity: Severity, ignore: Collection[str] = ()) -> Iterator[Problem]:
    """What the checks of this severity find, but for those in `ignore`."""
    for known in all_checks().values():
        if known.severity == severity and known.id not in ignore:
            for found in known.find(cluster):
                yield replace(found, rule=known.id)


def groups_of(cluster: ClusterConfig) -> Iterator[tuple[str, Group]]:
    """Every group, restricted ones too, with the path of its field."""
    for field in ("instance_groups", "restricted_groups"):
        for index, group in enumerate(getattr(cluster, field)):
            yield f"{field}.{index}", group


def named_types(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Every type of machine that groups may have, with the path of its field."""
    for path, group in groups_of(cluster):
        yield f"{path}.instance_type", group.instance_type
        if isinstance(group, InstanceGroup):
            for index, other in enumerate(group.other_types):
                yield f"{path}.other_types.{index}", other
