"""Checks of training plans and the machines in them."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog import facts
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem


def plan_types() -> frozenset[str]:
    """Return the instance types for which AWS sells training plans."""
    return frozenset(facts("training_plans.json")["types"])


@check(
    "HPX203",
    "error",
    "a training plan for an instance type without plans",
    "AWS sells training plans only for some instance types. A group of another type uses none of the plan's machines, "
    "and the plan costs money anyway. Source: SageMaker's API model, `catalog/training_plans.json`.",
    "Set the group's type to the plan's type, or remove the plan. If AWS has added the type, use --ignore HPX203.",
)
def plans_hold_the_type(cluster: ClusterConfig) -> Iterator[Problem]:
    for path, group in groups_of(cluster):
        if group.training_plan is not None and group.instance_type not in plan_types():
            message = f"there are no training plans for {group.instance_type}"
            hint = f"types with training plans: {', '.join(sorted(plan_types()))}"
            yield Problem(message, path=f"{path}.training_plan", hint=hint)


@check(
    "HPX204",
    "error",
    "one training plan for two instance types",
    "A training plan has machines of one instance type. A group of another type gets no machines from the plan.",
    "Use a different training plan for each instance type.",
)
def plans_are_of_one_type(cluster: ClusterConfig) -> Iterator[Problem]:
    first: dict[str, tuple[str, str]] = {}
    for path, group in groups_of(cluster):
        if group.training_plan is None:
            continue
        name, kind = first.setdefault(group.training_plan, (group.name, group.instance_type))
        if kind != group.instance_type:
            message = f"group {name} uses the same plan for {kind}, but this group has {group.instance_type}"
            yield Problem(message, path=f"{path}.training_plan", hint="use a different plan for each instance type")
