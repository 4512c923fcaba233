"""Domain rules: combinations of valid fields with which a job would fail on a cluster, or waste paid machines.

The ids of domain rules are HPX101 and up. The ids HPX001 to HPX099 belong to the checks of the spec itself, in
`config.files.checks`, which users cannot ignore.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from hyperpod_ext.config.files.rule import Registry
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.document import Path
    from hyperpod_ext.jobs.contract.capabilities import Capabilities
    from hyperpod_ext.jobs.kubernetes.sizes import NodeShare
    from hyperpod_ext.jobs.rules.script_code import Code

KUBERNETES = frozenset({"hyperpod-eks", "kubeflow"})


@dataclass(frozen=True)
class Context:
    """Input of a rule: the job, and its cluster, target and folder where they are known."""

    job: JobConfig
    cluster: ClusterConfig | None = None
    target: str | None = None
    """Target of the job; None if no target was chosen, in which case rules check only the spec."""
    folder: FilePath | None = None
    """Folder of the spec, which contains the script; None: rules do not read the script."""

    @cached_property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of the target; None if the target is not set or not known."""
        return get_target(self.target).capabilities() if self.target in TARGETS else None

    @cached_property
    def node_shares(self) -> list[tuple[Path, NodeShare]]:
        """Resource requests of a pod for each instance type of the job, with the field that names the type.

        The type in `resources.instance_type` is last.
        """
        from hyperpod_ext.jobs.kubernetes.sizes import node_shares

        return node_shares(self.job)

    @cached_property
    def script(self) -> FilePath | None:
        """File of the script on this machine; None if the script is in an image, or missing."""
        name = FilePath(self.job.script)
        if self.folder is None or self.job.working_dir is not None or name.is_absolute():
            return None
        file = self.folder / name
        return file.resolve() if file.is_file() else None

    @cached_property
    def script_code(self) -> list[Code]:
        """Syntax tree nodes of the script and of the modules that it imports from its folder, one list for each file.

        The result is empty if any file cannot be read.
        """
        from hyperpod_ext.jobs.rules.script_code import read_all

        return [] if self.script is None else read_all(self.script)

    def may_be(self, *targets: str) -> bool:
        """Return whether the target is one of `targets`, or unknown."""
        return self.target is None or self.target in targets


_OF_PODS: dict[str, set[str]] = {
    "machines": {"resources", "node_groups"},
    "images": {"image", "mode"},
    "cluster_objects": {"kubernetes", "volumes", "scheduling", "node_groups", "labels", "annotations"},
    "pods": set(),
}
"""Modules with rules for jobs in pods, each with fields of a spec. If a job sets one of these fields, the module's
rules check the job on all targets."""


def needed(context: Context) -> list[str]:
    """Return the modules with rules that may apply to the job."""
    job, in_pods = context.job, context.may_be(*KUBERNETES)
    of_pods = [name for name, fields in _OF_PODS.items() if in_pods or fields & job.model_fields_set]
    sections = ["sections"] if job.kubernetes.container or job.kubernetes.pod else []
    scripts = ["scripts"] if job.mode in ("ours", "run") and context.script is not None else []
    return ["features", *of_pods, *sections, "numbers", "texts", *scripts]


REGISTRY: Registry[Context] = Registry(
    __name__, ("features", *_OF_PODS, "sections", "numbers", "texts", "scripts"), needed
)
rule, all_rules, findings = REGISTRY.rule, REGISTRY.all, REGISTRY.findings
