"""Terms of AWS's checkpointless training, with their tier and their counterpart in this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyperpod_ext.catalog import facts

_FILE = "aws_terms.json"
COMPAT_PAGE = "docs/compat-aws.md"
"""Page with all names that a job with `compat: aws` has."""


@dataclass(frozen=True, slots=True)
class Term:
    """One class, function or environment variable of AWS."""

    name: str
    """As AWS spells it."""
    module: str
    """AWS's module that has it; empty: it is an environment variable."""
    tier: int
    """1 to 4: the tier of AWS's launch article that it belongs to; 0: none."""
    means: str
    """Purpose of the term at AWS."""
    ours: str
    """The counterpart in this project."""
    fields: tuple[str, ...]
    """Fields of a job spec that correspond to it, dotted."""
    compat: Literal["works", "partly", "refused"]
    """Its effect in a job with `compat: aws`."""
    how: str
    """The effect in words; if it is refused, what to write instead."""


def tiers() -> Mapping[int, str]:
    """Return the title of each tier of the article; 0: of names that are in none."""
    return {0: "elastic training"} | {int(number): title for number, title in facts(_FILE)["tiers"].items()}


def terms() -> tuple[Term, ...]:
    """Return all terms, by tier."""
    return tuple(Term(**{**one, "fields": tuple(one["fields"])}) for one in facts(_FILE)["terms"])


def packages() -> frozenset[str]:
    """Return AWS's packages that have the names."""
    return frozenset(one.module.partition(".")[0] for one in terms() if one.module)


def tiers_of(field: str) -> list[int]:
    """Return the tiers of a field of the job spec; `checkpoint.tiers.uri` belongs to `checkpoint.tiers`."""
    found = {
        one.tier
        for one in terms()
        if one.tier and any(field == name or field.startswith(f"{name}.") for name in one.fields)
    }
    return sorted(found)
