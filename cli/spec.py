"""Reads the specs of a job and a cluster that a command names, and applies changes by command-line options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import count, say

if TYPE_CHECKING:
    from hyperpod_ext.clusters.cdk.outputs import ClusterOutputs
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.checks import Check, Finding
    from hyperpod_ext.config.files.document import Document
    from hyperpod_ext.config.files.load import Loaded
    from hyperpod_ext.config.files.overrides import Override
    from hyperpod_ext.config.files.rule import Registry
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.errors import Problem
    from hyperpod_ext.jobs.plan import Plan


class Specs:
    """The specs that one command reads: the spec of a job, and optionally the spec of a cluster.

    Raises:
        ConfigError: the specs have problems. The error lists the problems of both specs.
    """

    def __init__(
        self,
        job_file: str,
        cluster_file: str | None,
        overrides: Sequence[str | Override],
        strict: bool = False,
        ignored: Sequence[str] = (),
        target: str | None = None,
    ) -> None:
        from hyperpod_ext.config.files.load import read
        from hyperpod_ext.config.job.job import JobConfig
        from hyperpod_ext.errors import ConfigError

        self._file = job_file
        self._target = target
        self._all_checked = False
        self._strict = strict
        self._ignored = _known(ignored)
        problems: list[Problem] = []
        of_cluster: list[Problem] = []
        loaded: Loaded[JobConfig] | None = None
        self.cluster: ClusterConfig | None = None
        self._outputs: ClusterOutputs | None = None
        if cluster_file is not None:
            from hyperpod_ext.config.clusters.cluster import ClusterConfig

            try:
                self.cluster = read(ClusterConfig, cluster_file).config
            except ConfigError as error:
                of_cluster += error.problems
        self._cluster_is_known = not of_cluster
        try:
            loaded = read(JobConfig, job_file, overrides, self._fill, self._spec_checks)
        except ConfigError as error:
            problems += error.problems
        if loaded is not None and of_cluster:
            problems += loaded.check(self._spec_checks())
        if problems or of_cluster or loaded is None:
            more = "" if self._all_checked else "Fix these first; some checks could not run."
            raise ConfigError([*problems, *of_cluster], hint=more)
        self._loaded = loaded
        self.job = loaded.config

    def _spec_checks(self) -> list[Check]:
        """Return the checks that compare several fields. Checks that compare fields run together with checks of single
        fields, so that all problems are reported at once."""
        from hyperpod_ext.config.files.checks import Check
        from hyperpod_ext.jobs.plan import draft_checks

        checks = draft_checks(
            self.cluster,
            self._target,
            self._ignored,
            lambda job: self._with_outputs(job, self._target),
            alone=not self._cluster_is_known,
        )
        return [*checks, Check(((),), self._note_that_all_ran)] if self._cluster_is_known else checks

    def _note_that_all_ran(self, _job: JobConfig, _files: object) -> Iterator[Finding]:
        """Record that all checks have run. `_note_that_all_ran` is itself a check, which is skipped if any field is
        invalid."""
        self._all_checked = True
        return iter(())

    def _fill(self, document: Document) -> None:
        """Fill in unset fields of the job's spec from the outputs of the cluster that the spec names."""
        if not (isinstance(document.data, dict) and document.data.get("cluster")):
            return
        from hyperpod_ext.clusters.cdk.jobs import fill, outputs_for

        if (found := outputs_for(document, Path(self._file).parent)) is None:
            return
        self._outputs, kept = found
        fill(document, self._outputs)
        if kept:
            name, age = self._outputs.name, self._outputs.age()
            say(f"cluster {name}: outputs read {age}; `hp-ext cluster outputs {name}` reads them again")

    def job_on(self, target: str | None) -> JobConfig:
        """Return the job with unset fields filled from its cluster, for the target `target`."""
        return self._with_outputs(self.job, target)

    def _with_outputs(self, job: JobConfig, target: str | None) -> JobConfig:
        if self._outputs is None:
            return job
        from hyperpod_ext.clusters.cdk.jobs import on_cluster

        return on_cluster(job, self._outputs, target)

    def check(self, target: str | None) -> None:
        """Check that the job fits the cluster and the target.

        Raises:
            UnsupportedError: the job does not fit the cluster or target. The error lists all problems with their lines.
        """
        from hyperpod_ext.errors import UnsupportedError
        from hyperpod_ext.jobs.plan import find_problems

        problems = find_problems(self.job_on(target), self.cluster, target, self._ignored)
        if self._strict:
            problems += self.warnings(target)
        if problems:
            raise UnsupportedError(self._loaded.locate(problems))

    def warnings(self, target: str | None) -> list[Problem]:
        """Return the probable mistakes in a valid spec, with their lines."""
        from hyperpod_ext.jobs.plan import find_warnings

        folder = Path(self._file).parent
        return self._loaded.locate(find_warnings(self.job_on(target), self.cluster, target, self._ignored, folder))

    def plan(self, target: str, templates: str | None = None) -> Plan:
        """Check the job, print warnings, and return the plan of its submission.

        Args:
            templates: folder with the user's own templates. None: use the shipped templates.
        """
        from hyperpod_ext.jobs.contract.render import own_templates
        from hyperpod_ext.jobs.plan import make_plan

        self.check(target)
        folder = Path(templates) if templates else None
        self._check_folder(folder)
        with own_templates(folder):
            job, here = self.job_on(target), Path(self._file).parent
            plan = make_plan(job, self.cluster, target, here, warnings=self.warnings(target))
        for warning in plan.warnings:
            say(f"warning: {warning}")
        return plan

    def _check_folder(self, folder: Path | None) -> None:
        from hyperpod_ext.errors import ConfigError
        from hyperpod_ext.jobs.own_templates import template_problems

        if folder is not None and (found := list(template_problems(folder))):
            raise ConfigError(found)

    def check_templates(self, target: str | None, folder: str) -> None:
        """Check the user's own templates in `folder`. With `target`, also render the templates and parse the results.

        Raises:
            ConfigError: a template cannot be read or rendered, or is never used.
        """
        from hyperpod_ext.jobs.contract.render import own_templates
        from hyperpod_ext.jobs.plan import make_plan
        from hyperpod_ext.jobs.submit import read_back

        self._check_folder(Path(folder))
        if target is None:
            return
        with own_templates(Path(folder)):
            read_back(make_plan(self.job_on(target), self.cluster, target, Path(self._file).parent, self._ignored))

    def without_faults(self) -> None:
        """Remove the faults to inject from the job's spec. The spec keeps the setting `chaos.compare`."""
        if self.job.chaos is not None:
            without_faults = self.job.chaos.model_copy(update={"faults": (), "inject": ()})
            self.job = self.job.model_copy(update={"chaos": without_faults})


def _known(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of rules as a tuple. Unknown ids are refused, because an unknown id would have no effect."""
    if not ignored:
        return ()
    from hyperpod_ext.jobs.rules import REGISTRY

    return known_ids(REGISTRY, ignored)


def known_ids(registry: Registry[Any], ids: Sequence[str]) -> tuple[str, ...]:
    """Return `ids`, after a check that the registry contains a rule with each id.

    Raises:
        BadParameter: an id is unknown.
    """
    import click

    try:
        return registry.check_ids(ids)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="'--ignore'") from None


def ranks_of(job: JobConfig) -> str:
    """Return the number of a job's ranks as text, such as `2 nodes x 8 workers = 16 ranks`."""
    return f"{count(job.nodes, 'node')} x {count(job.workers_per_node, 'worker')} = {count(job.world_size, 'rank')}"
