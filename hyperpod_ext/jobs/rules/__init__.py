"""Domain rules: what is right field by field, and would still fail on the cluster, or waste it.

Their ids are HPX101 and up. HPX001 to HPX099 are the checks of the spec itself, in `config.files.checks`; they cannot
be ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyperpod_ext.config.files.rule import Registry
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.capabilities import Capabilities

KUBERNETES = frozenset({"hyperpod-eks", "kubeflow"})
_MODULES = ("features", "machines", "images", "cluster_objects", "pods", "storage", "budgets", "numbers", "secrets")


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule looks at."""

    job: JobConfig
    cluster: ClusterConfig | None = None
    target: str | None = None
    """None: the spec alone is checked, whatever it is for."""

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the target, where the job is for one that is known."""
        return get_target(self.target).capabilities() if self.target in TARGETS else None

    def may_be(self, *targets: str) -> bool:
        """Whether the job is for one of `targets`, as far as is known."""
        return self.target is None or self.target in targets


REGISTRY: Registry[Context] = Registry(__name__, _MODULES)
rule, all_rules, findings = REGISTRY.rule, REGISTRY.all, REGISTRY.findings
