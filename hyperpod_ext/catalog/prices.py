"""On-demand prices of machines and other AWS resources per hour, each with its date and its source.

An unknown price is None, not 0, so that estimates can list the items without a price.
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
    """On-demand price of one item."""

    usd: float
    """US dollars per hour for one item."""
    source: str
    """Key of the price's source in `sources()`."""
    dated: str
    """Date of the price, such as 2026-09-01."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source of prices."""

    name: str
    dated: str
    text: str


@functools.cache
def sources() -> Mapping[str, Source]:
    """Return all sources of prices, by name."""
    return {name: Source(name, **fields) for name, fields in facts(_FILE)["sources"].items()}


def regions() -> list[str]:
    """Return the regions for which the catalog has at least one price."""
    return sorted(facts(_FILE)["regions"])


def machine_price(instance_type: str, region: str) -> Price | None:
    """Return the price of one machine of an instance type; None if unknown."""
    return _find(region, "machines", instance_type)


def why_no_price(instance_type: str) -> str:
    """Return why AWS has no on-demand price for an instance type. Empty if AWS has a price, or if the reason is
    unknown."""
    known = facts(_FILE)["no_on_demand"]
    return str(known["text"]) if instance_type in known["types"] else ""


def resource_price(kind: str, region: str) -> Price | None:
    """Return the price of one resource of a CloudFormation type; None if unknown. The price of an interface endpoint is
    for one subnet."""
    return _find(region, "resources", kind)


def lustre_price(gib: int, throughput: int, region: str) -> Price | None:
    """Return the price of an FSx for Lustre file system (PERSISTENT_2, SSD) of `gib` GiB with a throughput of
    `throughput` MB/s per TiB; None if unknown."""
    month = _find(region, "lustre_gb_month", str(throughput))
    return month and Price(month.usd * gib / _HOURS_A_MONTH, month.source, month.dated)


def is_free(kind: str) -> bool:
    """Return whether AWS charges nothing for resources of the CloudFormation type `kind`."""
    return kind in facts(_FILE)["free"]


def by_use(kind: str) -> str | None:
    """Return the unit by which AWS charges the use of a resource of the CloudFormation type `kind`. None if AWS charges
    by the hour."""
    found: str | None = facts(_FILE)["by_use"].get(kind)
    return found


def _find(region: str, table: str, name: str) -> Price | None:
    for source, prices in facts(_FILE)["regions"].get(region, {}).get(table, {}).items():
        if name in prices:
            return Price(prices[name], source, sources()[source].dated)
    return None
