"""Properties of CloudFormation types that an update cannot change: another value replaces the resource."""

from __future__ import annotations

from dataclasses import dataclass

from hyperpod_ext.catalog import facts


@dataclass(frozen=True, slots=True)
class CreateOnly:
    """Paths of properties, dotted; `*` is any item of a list."""

    always: tuple[str, ...]
    """Paths of properties of which another value replaces the resource."""
    sometimes: tuple[str, ...]
    """Paths of properties of which some values replace the resource. The schema does not say which."""


def create_only(kind: str) -> CreateOnly | None:
    """Return the create-only properties of a CloudFormation type; None for an unknown type."""
    fields = facts("create_only.json")["types"].get(kind)
    if fields is None:
        return None
    return CreateOnly(tuple(fields.get("always", ())), tuple(fields.get("sometimes", ())))
