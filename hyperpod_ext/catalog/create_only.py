"""Create-only properties of CloudFormation types: an update of such properties replaces the resource."""

from __future__ import annotations

from dataclasses import dataclass

from hyperpod_ext.catalog import facts


@dataclass(frozen=True, slots=True)
class CreateOnly:
    """Dotted paths of the create-only properties of one CloudFormation type. `*` in a path stands for any item of a
    list."""

    always: tuple[str, ...]
    """Paths of properties for which every change of the value replaces the resource."""
    sometimes: tuple[str, ...]
    """Paths of properties for which some changes of the value replace the resource. CloudFormation's schema does not
    say which changes replace the resource."""


def create_only(kind: str) -> CreateOnly | None:
    """Return the create-only properties of a CloudFormation type; None for an unknown type."""
    fields = facts("create_only.json")["types"].get(kind)
    if fields is None:
        return None
    return CreateOnly(tuple(fields.get("always", ())), tuple(fields.get("sometimes", ())))
