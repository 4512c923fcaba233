"""Makes a Plan: checks what only job, cluster and target together show, and renders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from hyperpod_ext.config.files.checks import Check, Finding, ListFiles
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem, UnsupportedError
from hyperpod_ext.submit.contract.capabilities import unsupported, unused
from hyperpod_ext.submit.contract.plan_type import Plan as Plan
from hyperpod_ext.submit.contract.targets import TARGETS, get_target
from hyperpod_ext.submit.rules import Context, Rule, all_rules, findings

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig

_ALL: tuple[Path, ...] = ((),)
"""What a check reads that may read any field."""


def make_plan(
    job: JobConfig,
    cluster: ClusterConfig | None = None,
    target: str = "local",
    source_dir: FilePath = FilePath(),
    ignore: Collection[str] = (),
    locate: Callable[[list[Problem]], list[Problem]] = list,
) -> Plan:
    """Check what only job, cluster and target together show, then render.

    Args:
        locate: fills in where the fields of warnings are written.

    Raises:
        UnsupportedError: holds every reason why this target cannot run this job.
        ConfigError: there is no such target.
    """
    if problems := find_problems(job, cluster, target, ignore):
        raise UnsupportedError(problems)
    module = get_target(target)
    warned = (str(problem) for problem in locate(find_warnings(job, cluster, target, ignore)))
    return Plan(
        target=target,
        name=job.name,
        job=job,
        files=module.render(job, cluster),
        world_size=job.world_size,
        source_dir=source_dir,
        warnings=(*unused(job, target, module.capabilities()), *module.warnings(job), *warned),
    )


def find_problems(
    job: JobConfig, cluster: ClusterConfig | None, target: str | None, ignore: Collection[str] = ()
) -> list[Problem]:
    """What only job, cluster and target together show to be wrong, but for the rules that are ignored."""
    problems: list[Problem] = []
    if target is not None:
        problems += unsupported(job, target, get_target(target).capabilities())
        problems += get_target(target).problems(job)
    if cluster is not None:
        problems += _cluster_problems(job, cluster)
    return problems + [one for one in findings(Context(job, cluster, target), "error") if one.rule not in ignore]


def plan_checks(
    cluster: ClusterConfig | None,
    target: str | None,
    ignore: Collection[str],
    complete: Callable[[JobConfig], JobConfig],
) -> list[Check]:
    """`find_problems` for a spec with mistakes: what more than the spec alone shows, where all of it could be read.

    Args:
        complete: adds to a job what its cluster says.
    """

    def by_target(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
        if target in TARGETS:  # else it is told once the file is right
            module, job = get_target(target), complete(job)
            for one in (*unsupported(job, target, module.capabilities()), *module.problems(job)):
                yield Finding(_parts(one.path), one.message, one.hint)
        for one in _cluster_problems(job, cluster) if cluster is not None else ():
            yield Finding(_parts(one.path), one.message, one.hint)

    def by_rule(known: Rule) -> Check:
        return Check(_ALL, lambda job, _files: known.find(Context(complete(job), cluster, target)), known.id)

    left = [one for one in all_rules().values() if one.severity == "error" and not one.reads and one.id not in ignore]
    return [Check(_ALL, by_target), *map(by_rule, left)]


def _parts(path: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in path.split(".") if part)


def find_warnings(
    job: JobConfig, cluster: ClusterConfig | None, target: str | None, ignore: Collection[str] = ()
) -> list[Problem]:
    """What will work, and is probably not what was meant."""
    return [one for one in findings(Context(job, cluster, target), "warning") if one.rule not in ignore]


def _cluster_problems(job: JobConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    if job.nodes > cluster.working_nodes:
        yield Problem(
            f"the job wants {job.nodes} nodes; cluster {cluster.name} has {cluster.working_nodes} besides its spares",
            path="nodes",
            hint=f"write at most {cluster.working_nodes}, or give the cluster more machines",
        )
