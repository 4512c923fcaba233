"""Rules that find valid specs whose jobs or clusters would fail, or waste machines.

Each rule is a pure function with a number, a cause and a fix, which `hp-ext explain` shows. A registry has the rules of
one kind of spec: `jobs.rules` has the rules of jobs, `clusters.checks` of clusters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path, dotted
from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import Problem

S = TypeVar("S")
Severity = Literal["error", "warning"]
Find = Callable[[S], Iterator[Finding] | Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """One mistake that a spec can have."""

    id: str
    severity: Severity
    title: str
    """The mistake, as a short sentence."""
    cause: str
    """The consequence, and its reason."""
    fix: str
    """How to fix it."""
    look: Find[S]
    reads: tuple[Path, ...] = ()
    """All fields that the rule reads; empty if the rule also reads a cluster or a target. A rule with fields also runs
    if other fields are invalid."""
    targets: Collection[str | None] | None = None
    """Targets that the rule applies to; None stands for jobs without a target. Default: every spec."""

    def find(self, seen: S) -> Iterator[Finding] | Iterator[Problem]:
        """Return all findings; none if the rule does not apply to the target."""
        if self.targets is not None and getattr(seen, "target", None) not in self.targets:
            return iter(())
        return self.look(seen)

    def problems(self, seen: S) -> Iterator[Problem]:
        """Yield the rule's problems, with its number."""
        for found in self.find(seen):
            if isinstance(found, Finding):
                found = Problem(found.message, path=dotted(found.path), hint=found.hint)
            yield replace(found, rule=self.id)


class Registry(Generic[S]):
    """The rules of one kind of spec.

    Args:
        modules: modules of `package` that register rules when they are imported.
        needed: returns the modules with rules that may apply to a spec. Default: all modules.
    """

    def __init__(
        self, package: str, modules: Collection[str], needed: Callable[[S], Iterable[str]] | None = None
    ) -> None:
        self._package, self._modules, self._needed = package, modules, needed
        self._rules: dict[str, Rule[S]] = {}

    def rule(
        self,
        id: str,
        severity: Severity,
        title: str,
        cause: str,
        fix: str,
        *,
        reads: tuple[str, ...] = (),
        targets: Collection[str] | None = None,
    ) -> Callable[[Find[S]], Find[S]]:
        """Register a function as the rule `id`: for jobs of `targets` or without a target, by default for all."""

        def enter(find: Find[S]) -> Find[S]:
            if id in self._rules and self._rules[id].look.__qualname__ != find.__qualname__:
                raise ValueError(f"two rules have the id {id}")
            fields = tuple(tuple(path.split(".")) for path in reads)
            named = None if targets is None else {*targets, None}
            self._rules[id] = Rule(id, severity, title, cause, fix, find, fields, named)
            return find

        return enter

    def all(self) -> dict[str, Rule[S]]:
        """Return every rule, by id."""
        return self._loaded(self._modules)

    def _loaded(self, modules: Iterable[str]) -> dict[str, Rule[S]]:
        """Import modules, and return their rules."""
        names = {importlib.import_module(f"{self._package}.{name}").__name__ for name in modules}
        return {id: rule for id, rule in sorted(self._rules.items()) if rule.look.__module__ in names}

    def findings(self, seen: S, severity: Severity, ignore: Collection[str] = ()) -> Iterator[Problem]:
        """Yield the problems of the rules of this severity, except those in `ignore`."""
        modules = self._modules if self._needed is None else self._needed(seen)
        for rule in self._loaded(modules).values():
            if rule.severity == severity and rule.id not in ignore:
                yield from rule.problems(seen)

    def check_ids(self, ids: Collection[str]) -> tuple[str, ...]:
        """Return `ids` as a tuple.

        Raises:
            KeyError: an id is unknown. The text has the nearest id.
        """
        known = self.all()
        for name in ids:
            if name not in known:
                hint = suggest(name, known)
                raise KeyError(f"there is no rule {name}: {hint if len(hint) < 80 else 'see hp-ext explain'}")
        return tuple(ids)
