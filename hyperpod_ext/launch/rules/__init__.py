"""Domain rules: what is right field by field, and would still fail on the cluster, or waste it.

Each rule has a stable id, HPX101 and up, a cause and a fix; `hp-ext explain HPX101` shows them. Rules are pure
functions of a Context. HPX001 to HPX099 are the checks of the spec itself, in `config.checks`; they cannot be ignored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hyperpod_ext.config.checks import Finding
from hyperpod_ext.config.document import dotted
from hyperpod_ext.config.job import JobConfig
from hyperpod_ext.errors import Problem

if TYPE_CHECKING:
    from hyperpod_ext.config.cluster import ClusterConfig

Severity = Literal["error", "warning"]
KUBERNETES = frozenset({"hyperpod-eks", "kubeflow"})
_MODULES = ("features", "machines", "images", "cluster_objects", "budgets", "numbers")


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule looks at."""

    job: JobConfig
    cluster: ClusterConfig | None = None
    target: str | None = None
    """None: the spec alone is checked, whatever it is for."""

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


RULES: dict[str, Rule] = {}
"""All rules by id, once `all_rules` was called."""


def rule(id: str, severity: Severity, title: str, cause: str, fix: str) -> Callable[
    [Callable[[Context], Iterator[Finding]]], Callable[[Context], Iterator[Finding]]
]:  # fmt: skip
    """Enters a function as the rule `id`."""

    def enter(find: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        if id in RULES and RULES[id].find.__qualname__ != find.__qualname__:
            raise ValueError(f"two rules are called {id}")
        RULES[id] = Rule(id, severity, title, cause, fix, find)
        return find

    return enter


def all_rules() -> dict[str, Rule]:
    """Every rule, by id."""
    for name in _MODULES:
        importlib.import_module(f"hyperpod_ext.launch.rules.{name}")
    return dict(sorted(RULES.items()))


def findings(context: Context, severity: Severity) -> Iterator[Problem]:
    """What the rules of this severity find."""
    for known in all_rules().values():
        if known.severity == severity:
            for found in known.find(context):
                yield Problem(found.message, path=dotted(found.path), hint=found.hint, rule=known.id)
