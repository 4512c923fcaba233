"""make_plan: check a job against its cluster and target, then render it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, cast

from hyperpod_ext.config.files.checks import Check, Finding, ListFiles
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.files.rule import Rule
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.counts import count
from hyperpod_ext.errors import Problem, UnsupportedError
from hyperpod_ext.jobs.contract.capabilities import unsupported, unused
from hyperpod_ext.jobs.contract.plan_type import Plan as Plan
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target
from hyperpod_ext.jobs.rules import Context, all_rules, findings

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig

_ALL: tuple[Path, ...] = ((),)
"""Value of `reads` for a check that may read any field: the path of the spec's root."""


def make_plan(
    job: JobConfig,
    cluster: ClusterConfig | None = None,
    target: str = "local",
    source_dir: FilePath = FilePath(),
    ignore: Collection[str] = (),
    *,
    warnings: Iterable[Problem] | None = None,
) -> Plan:
    """Check a job against its cluster and target, then render it.

    Args:
        ignore: ids of rules that are not checked.
        warnings: result of `find_warnings`, if the caller has already checked the job; None: check the job now.

    Raises:
        UnsupportedError: this target cannot run this job. The error lists every reason.
        ConfigError: there is no such target.
    """
    if warnings is None:
        if problems := find_problems(job, cluster, target, ignore):
            raise UnsupportedError(problems)
        warnings = find_warnings(job, cluster, target, ignore, source_dir)
    module = get_target(target)
    return Plan(
        target=target,
        name=job.name,
        job=job,
        files=module.render(job, cluster),
        world_size=job.world_size,
        source_dir=source_dir,
        warnings=(*unused(job, target, module.capabilities()), *module.warnings(job), *map(str, warnings)),
    )


def find_problems(
    job: JobConfig,
    cluster: ClusterConfig | None,
    target: str | None,
    ignore: Collection[str] = (),
    *,
    rules: bool = True,
) -> list[Problem]:
    """Return the errors of a job on a cluster and target.

    Args:
        cluster: cluster of the job; None skips checks that depend on a cluster.
        target: target of the job; None skips checks that depend on a target.
        ignore: ids of rules that are not checked.
        rules: also check the domain rules (HPX101 and up).
    """
    problems: list[Problem] = []
    if target is not None:
        module = get_target(target)
        problems += [*unsupported(job, target, module.capabilities()), *module.problems(job)]
    if cluster is not None:
        problems += _cluster_problems(job, cluster)
    return problems + list(findings(Context(job, cluster, target), "error", ignore) if rules else ())


def draft_checks(
    cluster: ClusterConfig | None,
    target: str | None,
    ignore: Collection[str],
    complete: Callable[[JobConfig], JobConfig],
    *,
    alone: bool,
) -> list[Check]:
    """Return the checks of `find_problems` in a form that also works for a spec with invalid fields.

    The caller skips each check that reads an invalid field.

    Args:
        ignore: ids of rules that are not checked.
        complete: adds settings of the cluster to a job.
        alone: skip checks that depend on a cluster or target, because the cluster cannot be read.
    """

    def by_target(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
        for one in find_problems(complete(job), cluster, target if target in TARGETS else None, rules=False):
            yield Finding(_parts(one.path), one.message, one.hint)

    def seen_by(rule: Rule[Context], job: JobConfig) -> Context:
        return Context(job) if rule.reads else Context(complete(job), cluster, target)

    def by_rule(rule: Rule[Context]) -> Check:
        def run(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
            return cast(Iterator[Finding], rule.find(seen_by(rule, job)))

        return Check(rule.reads or _ALL, run, rule.id)

    rules = [one for one in all_rules().values() if one.severity == "error" and one.id not in ignore]
    own = [by_rule(one) for one in rules if one.reads]
    return own if alone else [*own, Check(_ALL, by_target), *(by_rule(one) for one in rules if not one.reads)]


def _parts(path: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in path.split(".") if part)


def find_warnings(
    job: JobConfig,
    cluster: ClusterConfig | None,
    target: str | None,
    ignore: Collection[str] = (),
    folder: FilePath | None = None,
) -> list[Problem]:
    """Return warnings about settings that work but are probably a mistake.

    Args:
        ignore: ids of rules that are not checked.
        folder: the spec's folder; with None, the script is not read.
    """
    return list(findings(Context(job, cluster, target, folder), "warning", ignore))


def _cluster_problems(job: JobConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    if job.nodes > cluster.working_nodes:
        yield Problem(
            f"the job needs {count(job.nodes, 'node')}, but cluster {cluster.name} has only {cluster.working_nodes}, "
            "not counting spares",
            path="nodes",
            hint=f"write at most {cluster.working_nodes}, or add machines to the cluster",
        )
