"""Zones that offer machines with accelerators."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("zones.json")


@functools.cache
def _facts() -> Any:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def zones_with(instance_type: str, region: str) -> Sequence[str]:
    """Return ids of the zones of `region` that offer the type; empty if unknown."""
    return list(_facts()["zones"].get(instance_type, {}).get(region, ()))


def zones_dated() -> str:
    """Return the day of these facts, 2026-11-24."""
    return str(_facts()["dated"])
