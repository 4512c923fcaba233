"""Rules that find valid specs whose jobs or clusters would fail, or would waste machines.

Each rule is a pure function with an id, a cause and a fix, which `hp-ext explain` shows. A registry has the rules for
one kind of spec: `jobs.rules` has the rules for jobs, and `clusters.checks` has the rules for clusters.
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
    """A rule: one kind of mistake that a spec can have, and the function that finds it."""

    id: str
    severity: Severity
    title: str
    """The mistake, in a few words."""
    cause: str
    """The consequence of the mistake, and the reason for the consequence."""
    fix: str
    """How the user can fix the mistake."""
    look: Find[S]
    reads: tuple[Path, ...] = ()
    """Paths of all fields that the rule reads. A rule with `reads` runs even if other fields are invalid. Empty for a
    rule that also reads a cluster or a target; a rule without `reads` runs only if all fields are valid."""
    targets: Collection[str | None] | None = None
    """Names of the targets that the rule applies to. The entry None in the collection stands for jobs without a target.
    Default: the rule applies to every spec."""

    def find(self, seen: S) -> Iterator[Finding] | Iterator[Problem]:
        """Return all findings in the spec `seen`, or no findings if the rule does not apply to the spec's target."""
        if self.targets is not None and getattr(seen, "target", None) not in self.targets:
            return iter(())
        return self.look(seen)

    def problems(self, seen: S) -> Iterator[Problem]:
        """Yield the problems that the rule finds in the spec `seen`, with the id of the rule."""
        for found in self.find(seen):
            if isinstance(found, Finding):
                found = Problem(found.message, path=dotted(found.path), hint=found.hint)
            yield replace(found, rule=self.id)


class Registry(Generic[S]):
    """The rules for one kind of spec.

    Args:
        modules: names of the modules in `package` that register rules when they are imported.
        needed: function that returns, for a spec, the names of the modules whose rules may apply to it. None: all
            modules.
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
        """Return a decorator that registers a function as the rule `id`. With `targets`, the rule applies only to jobs
        for one of `targets` and to jobs without a target."""

        def enter(find: Find[S]) -> Find[S]:
            if id in self._rules and self._rules[id].look.__qualname__ != find.__qualname__:
                raise ValueError(f"two rules have the id {id}")
            fields = tuple(tuple(path.split(".")) for path in reads)
            named = None if targets is None else {*targets, None}
            self._rules[id] = Rule(id, severity, title, cause, fix, find, fields, named)
            return find

        return enter

    def all(self) -> dict[str, Rule[S]]:
        """Return every rule of the registry, by id."""
        return self._loaded(self._modules)

    def _loaded(self, modules: Iterable[str]) -> dict[str, Rule[S]]:
        """Import the named modules, and return the rules that the modules register, by id."""
        names = {importlib.import_module(f"{self._package}.{name}").__name__ for name in modules}
        return {id: rule for id, rule in sorted(self._rules.items()) if rule.look.__module__ in names}

    def findings(self, seen: S, severity: Severity, ignore: Collection[str] = ()) -> Iterator[Problem]:
        """Yield the problems in the spec `seen` that rules with the severity `severity` find. Rules whose ids are in
        `ignore` are skipped."""
        modules = self._modules if self._needed is None else self._needed(seen)
        for rule in self._loaded(modules).values():
            if rule.severity == severity and rule.id not in ignore:
                yield from rule.problems(seen)

    def check_ids(self, ids: Collection[str]) -> tuple[str, ...]:
        """Return `ids` as a tuple, after a check that a rule with each id exists.

        Raises:
            KeyError: an id is unknown. The error message suggests the most similar id.
        """
        known = self.all()
        for name in ids:
            if name not in known:
                hint = suggest(name, known)
                raise KeyError(f"there is no rule {name} ({hint if len(hint) < 80 else '`hp-ext explain` lists all'})")
        return tuple(ids)
