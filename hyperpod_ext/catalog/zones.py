"""Zones that offer machines with accelerators."""

from __future__ import annotations

from collections.abc import Sequence

from hyperpod_ext.catalog import facts

_FILE = "zones.json"


def zones_with(instance_type: str, region: str) -> Sequence[str]:
    """Return ids of the zones of `region` that offer the type; empty if unknown."""
    return list(facts(_FILE)["zones"].get(instance_type, {}).get(region, ()))


def zones_dated() -> str:
    """Return the day of these facts, 2026-11-24."""
    return str(facts(_FILE)["dated"])
