"""On-demand prices of machines and resources per hour, each with day and source.

An unknown price is None, not 0, so that sums can list the missing items.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.catalog import facts

_FILE = "prices.json"
_HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Price:
    """One price."""

    usd: float
    """US dollars per hour of one item."""
    source: str
    """Key of the source in `sources()`."""
    dated: str
    """Day of the price, 2026-09-01."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source of prices."""

    name: str
    dated: str
    text: str


@functools.cache
def sources() -> Mapping[str, Source]:
    """Return all sources by name."""
    return {name: Source(name, **fields) for name, fields in facts(_FILE)["sources"].items()}


def regions() -> list[str]:
    """Return the regions with some known prices."""
    return sorted(facts(_FILE)["regions"])


def machine_price(instance_type: str, region: str) -> Price | None:
    """Return the price of one machine of a type; None if unknown."""
    return _find(region, "machines", instance_type)


def why_no_price(instance_type: str) -> str:
    """Return why AWS has no on-demand price for a type; empty if it has one, or the reason is unknown."""
    known = facts(_FILE)["no_on_demand"]
    return str(known["text"]) if instance_type in known["types"] else ""


def resource_price(kind: str, region: str) -> Price | None:
    """Return the price of one resource of a CloudFormation type; for an interface endpoint, in one subnet."""
    return _find(region, "resources", kind)


def lustre_price(gib: int, throughput: int, region: str) -> Price | None:
    """Return the price of an FSx for Lustre file system (PERSISTENT_2, SSD), at `throughput` MB/s for each TiB."""
    month = _find(region, "lustre_gb_month", str(throughput))
    return month and Price(month.usd * gib / _HOURS_A_MONTH, month.source, month.dated)


def is_free(kind: str) -> bool:
    """Return whether resources of this CloudFormation type are free."""
    return kind in facts(_FILE)["free"]


def by_use(kind: str) -> str | None:
    """Return the unit of use that a resource of this CloudFormation type is paid by; None if it is paid by time."""
    found: str | None = facts(_FILE)["by_use"].get(kind)
    return found


def _find(region: str, table: str, name: str) -> Price | None:
    for source, prices in facts(_FILE)["regions"].get(region, {}).get(table, {}).items():
        if name in prices:
            return Price(prices[name], source, sources()[source].dated)
    return None
