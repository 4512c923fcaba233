"""The command `hp-ext explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..output import columns, print_result

if TYPE_CHECKING:
    from collections.abc import Collection

    from hyperpod_ext.catalog.aws_terms import Term
    from hyperpod_ext.config.files.rule import Rule


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext explain
  hp-ext explain HPX112
  hp-ext explain job.elastic.min_nodes
  hp-ext explain HPWrapper
  hp-ext explain tier-3""",
)
@click.argument(
    "what",
    required=False,
    metavar="[RULE|FIELD|AWS-NAME|tier-N]",
    shell_complete=lambda _ctx, _param, text: _matches(text),
)
@output_option()
def command(what: str | None, output: str) -> None:
    """Explain a rule, a field of a spec, or a name in AWS's checkpointless training and its counterpart in this
    project.

    The names tier-1 to tier-4 mean the four tiers in AWS's launch article of checkpointless training.
    """
    from hyperpod_ext.config.files.nearest import suggest_or_list
    from hyperpod_ext.errors import NotFoundError

    rules = _rules()
    if what is None:
        listed = [{"id": one.id, "severity": one.severity, "title": one.title} for one in rules.values()]
        table = columns([("RULE", "SEVERITY", "PROBLEM"), *(tuple(r.values()) for r in listed)])
        print_result(listed, output, f"{table}\n\nFields and AWS names: {', '.join(_matches('', rules))}")
    elif what.upper().startswith("HPX"):
        _explain_rule(what.upper(), rules, output)
    elif found := _terms_of(what):
        _explain_terms(found, output)
    elif what.partition(".")[0] not in (names := _matches("")):
        hint = suggest_or_list(what, names, "hp-ext explain")
        raise NotFoundError(f"there is no rule, field or AWS name `{what}`", hint=hint)
    else:
        _explain_field(what, output)


def _matches(incomplete: str, left_out: Collection[str] = ()) -> list[str]:
    """Return the values of the argument that begin with `incomplete`. Fields with more dots than `incomplete` are left
    out, so that shells complete a section before its fields."""
    from hyperpod_ext.catalog.aws_terms import terms
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.schema_path import field_paths
    from hyperpod_ext.config.job.job import JobConfig

    paths = [("job",), *field_paths(JobConfig), *field_paths(ClusterConfig, ("cluster",))]
    fields = [".".join(map(str, path)) for path in paths]
    of_aws = [name for one in terms() for name in (one.name, f"tier-{one.tier}") if one.tier]
    return [
        name
        for name in dict.fromkeys([*_rules(), *fields, *of_aws])
        if name.startswith(incomplete) and name.count(".") <= incomplete.count(".") and name not in left_out
    ]


def _terms_of(what: str) -> list[Term]:
    """Return the terms of AWS's checkpointless training with the name `what`, in upper or lower case. For a tier such
    as `tier-1`, return all terms of the tier."""
    from hyperpod_ext.catalog.aws_terms import terms

    return [one for one in terms() if what.lower() in (one.name.lower(), f"tier-{one.tier}")]


def _explain_terms(found: list[Term], output: str) -> None:
    from dataclasses import asdict

    from hyperpod_ext.catalog.aws_terms import tiers

    parts = []
    for one in found:
        fields = f"\n\nfields: {', '.join(one.fields)}" if one.fields else ""
        of = f"AWS checkpointless training, tier {one.tier}: " if one.tier else "AWS "
        title = f"{one.name} ({of}{tiers()[one.tier]})"
        compat = f"With `compat: aws` ({one.compat}): {one.how}"
        parts.append(f"{title}\n\nAt AWS: {one.means}.\nHere: {one.ours}\n{compat}{fields}")
    print_result([asdict(one) for one in found], output, "\n\n\n".join(parts))


def _rules() -> dict[str, Rule[Any]]:
    """Return all rules by id, and the checks in `config.files.checks`, each as a Rule object."""
    from hyperpod_ext.clusters.checks import all_checks
    from hyperpod_ext.config.files.check_texts import TEXTS
    from hyperpod_ext.config.files.rule import Rule
    from hyperpod_ext.jobs.rules import all_rules

    checks: dict[str, Rule[Any]] = {
        name: Rule(name, "error", *texts, look=lambda _context: iter(())) for name, texts in TEXTS.items()
    }
    return {**checks, **all_rules(), **all_checks()}


def _explain_rule(name: str, rules: dict[str, Rule[Any]], output: str) -> None:
    from hyperpod_ext.config.files.nearest import suggest_or_list
    from hyperpod_ext.errors import NotFoundError

    if name not in rules:
        raise NotFoundError(f"there is no rule {name}", hint=suggest_or_list(name, rules, "hp-ext explain"))
    rule = rules[name]
    explained = {"id": rule.id, "severity": rule.severity, "title": rule.title, "cause": rule.cause, "fix": rule.fix}
    text = f"{rule.id} ({rule.severity}): {rule.title}\n\n{rule.cause}\n\n{rule.fix}"
    print_result(explained, output, text)


def _explain_field(what: str, output: str) -> None:
    from hyperpod_ext.catalog.aws_terms import tiers_of
    from hyperpod_ext.config.base import Config
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.explain import explain
    from hyperpod_ext.config.job.job import JobConfig

    spec, _, path = what.partition(".")
    specs: dict[str, type[Config]] = {"job": JobConfig, "cluster": ClusterConfig}
    model = specs.get(spec)
    explained = explain(model, path) if model else explain(JobConfig, what)
    rows = [
        (label, str(explained[key]))
        for label, key in (("type", "type"), ("default", "default"), ("example", "example"))
        if explained[key] is not None
    ]
    aws = [f"tier-{tier}" for tier in tiers_of(explained["path"])] if model in (None, JobConfig) else []
    explained["aws_tiers"] = aws
    text = f"{explained['path']}\n\n{explained['description']}\n"
    if rows:
        text += "\n" + columns(rows) + "\n"
    if aws:
        text += f"\nAWS's checkpointless training: {', '.join(aws)} (`hp-ext explain {aws[0]}`)\n"
    if explained["fields"]:
        text += "\nfields: " + ", ".join(explained["fields"]) + "\n"
    print_result(explained, output, text.rstrip("\n"))
