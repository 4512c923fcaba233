"""Domain rules: what is right field by field, and would still fail on the cluster, or waste it.

Each rule has a stable id, HPX101 and up, a cause and a fix; `hp-ext explain HPX101` shows them. Rules are pure
functions of a Context. HPX001 to HPX099 are the checks of the spec itself, in `config.files.checks`; they cannot be
ignored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hyperpod_ext.config.files.checks import Check, Finding, ListFiles
from hyperpod_ext.config.files.document import Path, dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.submit.contract.targets import TARGETS, get_target

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.submit.contract.capabilities import Capabilities

Severity = Literal["error", "warning"]
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


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong."""

    id: str
    severity: Severity
    title: str
    """What is wrong, as a short sentence."""
    cause: str
    """What would happen, and why."""
    fix: str
    """What to do."""
    find: Callable[[Context], Iterator[Finding]]
    reads: tuple[Path, ...] = ()
    """Fields of the job that it concludes from, where it looks at nothing else: it is then told of a spec with mistakes
    in other fields, too."""


RULES: dict[str, Rule] = {}
"""All rules by id, once `all_rules` was called."""


def rule(
    id: str, severity: Severity, title: str, cause: str, fix: str, *, reads: tuple[str, ...] = ()
) -> Callable[[Callable[[Context], Iterator[Finding]]], Callable[[Context], Iterator[Finding]]]:
    """Enters a function as the rule `id`."""

    def enter(find: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        if id in RULES and RULES[id].find.__qualname__ != find.__qualname__:
            raise ValueError(f"two rules are called {id}")
        RULES[id] = Rule(id, severity, title, cause, fix, find, tuple(tuple(path.split(".")) for path in reads))
        return find

    return enter


def all_rules() -> dict[str, Rule]:
    """Every rule, by id."""
    for name in _MODULES:
        importlib.import_module(f"hyperpod_ext.submit.rules.{name}")
    return dict(sorted(RULES.items()))


def findings(context: Context, severity: Severity) -> Iterator[Problem]:
    """What the rules of this severity find."""
    for known in all_rules().values():
        if known.severity == severity:
            for found in known.find(context):
                yield Problem(found.message, path=dotted(found.path), hint=found.hint, rule=known.id)


def spec_checks(ignore: Collection[str] = ()) -> list[Check]:
    """Errors that the spec alone shows, for a spec that is not right field by field."""

    def check(known: Rule) -> Check:
        def run(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
            return known.find(Context(job))

        return Check(known.reads, run, known.id)

    rules = all_rules().values()
    return [check(one) for one in rules if one.reads and one.severity == "error" and one.id not in ignore]
