"""Names in AWS's checkpointless training, each with its tier and its counterpart in this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyperpod_ext.catalog import facts

_FILE = "aws_terms.json"
COMPAT_PAGE = "docs/compat-aws.md"
"""Documentation page that lists all names of AWS that a job with `compat: aws` can use."""


@dataclass(frozen=True, slots=True)
class Term:
    """One class, function or environment variable of AWS's checkpointless training."""

    name: str
    """Name of the class, function or variable, as AWS spells it."""
    module: str
    """Python module of AWS that defines the name. Empty for an environment variable."""
    tier: int
    """Number of the tier in AWS's launch article that the name belongs to, from 1 to 4. 0: no tier."""
    means: str
    """Purpose of the name in AWS's packages."""
    ours: str
    """Counterpart of the name in this project."""
    fields: tuple[str, ...]
    """Dotted paths of the fields in a job spec that correspond to the name."""
    compat: Literal["works", "partly", "refused"]
    """Whether the name works in a job with `compat: aws`, works partly, or is refused."""
    how: str
    """Effect of the name in a job with `compat: aws`, as text. For a refused name: what to write instead."""


def tiers() -> Mapping[int, str]:
    """Return the title of each tier in AWS's launch article, by number. 0 stands for names that belong to no tier."""
    return {0: "elastic training"} | {int(number): title for number, title in facts(_FILE)["tiers"].items()}


def terms() -> tuple[Term, ...]:
    """Return all terms, sorted by tier."""
    return tuple(Term(**{**one, "fields": tuple(one["fields"])}) for one in facts(_FILE)["terms"])


def packages() -> frozenset[str]:
    """Return the names of AWS's Python packages that define the terms."""
    return frozenset(one.module.partition(".")[0] for one in terms() if one.module)


def tiers_of(field: str) -> list[int]:
    """Return the tiers of AWS's launch article that a field of the job spec belongs to. A field such as
    `checkpoint.tiers.uri` also belongs to the tiers of `checkpoint.tiers`."""
    found = {
        one.tier
        for one in terms()
        if one.tier and any(field == name or field.startswith(f"{name}.") for name in one.fields)
    }
    return sorted(found)
