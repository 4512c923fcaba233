"""Domain rules: combinations of valid fields that would fail on a cluster or waste it.

Their ids are HPX101 and up. HPX001 to HPX099 are the checks of the spec itself, in `config.files.checks`; they cannot
be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyperpod_ext.config.files.rule import Find, Registry, Severity
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.capabilities import Capabilities

KUBERNETES = frozenset({"hyperpod-eks", "kubeflow"})


@dataclass(frozen=True, slots=True)
class Context:
    """Input of a rule."""

    job: JobConfig
    cluster: ClusterConfig | None = None
    target: str | None = None
    """None: only the spec is checked, without a target."""

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of the target; None without a known target."""
        return get_target(self.target).capabilities() if self.target in TARGETS else None

    def may_be(self, *targets: str) -> bool:
        """Whether the target is one of `targets`, or unknown."""
        return self.target is None or self.target in targets


def _in_pods(*fields: str) -> Callable[[Context], bool]:
    """Return a check whether the job may run in pods or its spec sets one of `fields`."""
    return lambda context: context.may_be(*KUBERNETES) or not context.job.model_fields_set.isdisjoint(fields)


_OBJECTS = ("kubernetes", "volumes", "scheduling", "node_groups", "labels", "annotations")
_MODULES: dict[str, Callable[[Context], bool] | None] = {
    "features": None,
    "machines": _in_pods("resources", "node_groups"),
    "images": _in_pods("image", "mode"),
    "cluster_objects": _in_pods(*_OBJECTS),
    "pods": _in_pods("kubernetes"),
    "storage": _in_pods(),
    "budgets": None,
    "numbers": None,
    "texts": None,
}
REGISTRY: Registry[Context] = Registry(__name__, _MODULES)
all_rules, findings, needed = REGISTRY.all, REGISTRY.findings, REGISTRY.needed


def rule(
    id: str,
    severity: Severity,
    title: str,
    cause: str,
    fix: str,
    *,
    reads: tuple[str, ...] = (),
    targets: Collection[str] = TARGETS,
) -> Callable[[Find[Context]], Find[Context]]:
    """Register a function as the rule `id` for jobs of `targets` or without a target."""
    when = None if targets is TARGETS else lambda context: context.may_be(*targets)
    return REGISTRY.rule(id, severity, title, cause, fix, reads=reads, when=when)
