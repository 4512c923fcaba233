"""Availability zones that offer machines with accelerators."""

from __future__ import annotations

from collections.abc import Sequence

from hyperpod_ext.catalog import facts

_FILE = "zones.json"


def zones_with(instance_type: str, region: str) -> Sequence[str]:
    """Return the ids of the availability zones in `region` that offer the instance type; empty if unknown."""
    return list(facts(_FILE)["zones"].get(instance_type, {}).get(region, ()))


def zones_dated() -> str:
    """Return the date of the facts about availability zones, such as 2026-11-24."""
    return str(facts(_FILE)["dated"])
