"""Formats a cluster's resources, costs and changes as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..output import columns

if TYPE_CHECKING:
    from hyperpod_ext.clusters.cdk.assembly import Assembly
    from hyperpod_ext.clusters.cdk.changes import ResourceChange
    from hyperpod_ext.clusters.cdk.costs import CostItem, Estimate

_SIGNS = {"create": "+", "update": "~", "replace": "!", "may replace": "!", "delete": "-", "keep": "="}
_NOTES = {
    "replace": "replaced",
    "may replace": "may be replaced",
    "delete": "deleted",
    "keep": "left in the account, no longer managed",
}


def contents(assembly: Assembly) -> dict[str, dict[str, int]]:
    """Return the number of resources of each CloudFormation type, for each stack."""
    return {
        stack.name: dict(sorted(Counter(one["Type"] for one in stack.resources.values()).items()))
        for stack in assembly.stacks
    }


def contents_text(assembly: Assembly) -> str:
    """Return a table with the resources of each stack, one line for each stack."""
    rows = [("STACK", "RESOURCES")]
    for stack, kinds in contents(assembly).items():
        rows.append((stack, _counted(kinds)))
    return columns(rows)


def _counted(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.removeprefix('AWS::')}" for kind, count in kinds.items())


def estimate_text(estimate: Estimate, scale: bool) -> str:
    """Return the costs per hour as a table. Without `scale`, the table has one column for the cluster as it is deployed
    and one for the cluster with all machines."""
    heads = ("NOW", "SCALED") if not scale else ("", "AN HOUR")
    rows: list[tuple[str, ...]] = [("USD AN HOUR", "EACH", *heads, "")]
    rows += [_line(line, scale) for line in estimate.items]
    rows.append(("together", "", "" if scale else _usd(estimate.now), _usd(estimate.scaled), _missing(estimate)))
    days = estimate.dated
    span = "" if days is None else f" of {days[0]}" if days[0] == days[1] else f" of {days[0]} to {days[1]}"
    notes = [f"on-demand prices in {estimate.region}{span}; yours may differ: https://aws.amazon.com/pricing"]
    if estimate.by_use:
        used = ", ".join(f"{kind.removeprefix('AWS::')} ({how})" for kind, how in estimate.by_use)
        notes.append(f"paid by use, not in the sum: {used}")
    return "\n".join([columns(rows), *notes])


def _line(line: CostItem, scale: bool) -> tuple[str, ...]:
    each = line.price.usd if line.price else None
    now = "" if scale else _product(each, line.now)
    what = line.what if line.scaled == 1 else f"{line.scaled} x {line.what}"
    return (what, _usd(each), now, _product(each, line.scaled), line.note)


def _product(each: float | None, count: int) -> str:
    return _usd(None if each is None and count else (each or 0.0) * count)


def _usd(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}" if 0 < value < 0.1 else f"{value:,.2f}"


def _missing(estimate: Estimate) -> str:
    unknown = len(estimate.unknown)
    return f"without {unknown} items of unknown price" if unknown else ""


def changes_text(changes: Sequence[ResourceChange]) -> str:
    """Return, as text, the changes that a deployment would make. New resources are counted by type and stack; all other
    changes are listed one by one, with the changed fields."""
    new: dict[str, Counter[str]] = {}
    lines = []
    for change in changes:
        if change.effect == "create":
            new.setdefault(change.stack, Counter())[change.kind] += 1
            continue
        note = f"  ({_NOTES[change.effect]})" if change.effect in _NOTES else ""
        lines.append(f"{_SIGNS[change.effect]} {change.stack}.{change.id} {change.kind}{note}")
        for field in change.fields:
            sign = "~" if field.effect == "update" else "!"
            note = "" if field.effect == "update" else f"  ({field.effect})"
            lines.append(f"    {sign} {field.path}: {_short(field.before)} -> {_short(field.after)}{note}")
    head = [f"+ {stack}: {_counted(dict(sorted(kinds.items())))}" for stack, kinds in new.items()]
    return "\n".join([*head, *lines]) or "nothing changes"


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
