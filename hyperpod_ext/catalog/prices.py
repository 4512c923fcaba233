"""What an hour costs, on demand: machines, and what stands around them. Dated, and with its source.

A price that is not known here is None, never 0: a sum then says what it leaves out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("prices.json")
_HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Price:
    """One price."""

    usd: float
    """US dollars for one hour of one."""
    source: str
    """Where it is from; `sources()` tells more."""
    dated: str
    """Day the source speaks of, 2026-09-01."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where prices are from."""

    name: str
    dated: str
    text: str


@functools.cache
def _table() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def sources() -> Mapping[str, Source]:
    """All sources by name."""
    return {name: Source(name, **fields) for name, fields in _table()["sources"].items()}


def regions() -> list[str]:
    """Regions of which some prices are known."""
    return sorted(_table()["regions"])


def machine_price(instance_type: str, region: str) -> Price | None:
    """Of one machine of this type, or None where it is not known."""
    return _find(region, "machines", instance_type)


def why_no_price(instance_type: str) -> str:
    """Why AWS has no on-demand price for a type; empty: it has one, or that is not known."""
    known = _table()["no_on_demand"]
    return str(known["text"]) if instance_type in known["types"] else ""


def resource_price(kind: str, region: str) -> Price | None:
    """Of one resource, by its CloudFormation type; of an interface endpoint, in one subnet."""
    return _find(region, "resources", kind)


def lustre_price(gib: int, throughput: int, region: str) -> Price | None:
    """Of an FSx for Lustre file system (PERSISTENT_2, SSD) of `gib`, at `throughput` MB/s for each TiB."""
    month = _find(region, "lustre_gb_month", str(throughput))
    return month and Price(month.usd * gib / _HOURS_A_MONTH, month.source, month.dated)


def is_free(kind: str) -> bool:
    """Whether a resource of this CloudFormation type costs nothing by being there."""
    return kind in _table()["free"]


def by_use(kind: str) -> str | None:
    """What a resource of this CloudFormation type is paid by, where that is its use and not its time."""
    found: str | None = _table()["by_use"].get(kind)
    return found


def _find(region: str, table: str, name: str) -> Price | None:
    for source, prices in _table()["regions"].get(region, {}).get(table, {}).items():
        if name in prices:
            return Price(prices[name], source, sources()[source].dated)
    return None
