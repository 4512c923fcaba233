"""Checks of training plans and their machines."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog import facts
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem


def plan_types() -> frozenset[str]:
    """Return the instance types of training plans."""
    return frozenset(facts("training_plans.json")["types"])


@check(
    "HPX203",
    "error",
    "a training plan for machines that plans do not hold",
    "Training plans are sold for some types only; with a group of another type none of the plan's machines is used, "
    "and the plan is paid all the same. By SageMaker's API model: `catalog/training_plans.json`.",
    "Give the group the type that the plan holds, or remove the plan. If AWS has added the type: --ignore HPX203.",
)
def plans_hold_the_type(cluster: ClusterConfig) -> Iterator[Problem]:
    for path, group in groups_of(cluster):
        if group.training_plan is not None and group.instance_type not in plan_types():
            message = f"there are no training plans for {group.instance_type}"
            hint = f"types that plans are for: {', '.join(sorted(plan_types()))}"
            yield Problem(message, path=f"{path}.training_plan", hint=hint)


@check(
    "HPX204",
    "error",
    "one training plan for two types",
    "A training plan holds machines of one type: a second group of another type gets none of them.",
    "Give each type a plan of its own.",
)
def plans_are_of_one_type(cluster: ClusterConfig) -> Iterator[Problem]:
    first: dict[str, tuple[str, str]] = {}
    for path, group in groups_of(cluster):
        if group.training_plan is None:
            continue
        name, kind = first.setdefault(group.training_plan, (group.name, group.instance_type))
        if kind != group.instance_type:
            message = f"the plan holds {kind} for group {name}, and this group is of {group.instance_type}"
            yield Problem(message, path=f"{path}.training_plan", hint="give each type a plan of its own")
