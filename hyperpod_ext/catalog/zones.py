"""Which zone of a region offers which machines with accelerators."""

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
    """Ids of the zones that offer the type; empty where nothing is known of it in `region`."""
    return list(_facts()["zones"].get(instance_type, {}).get(region, ()))


def zones_dated() -> str:
    """Day on which that was read, 2026-11-24."""
    return str(_facts()["dated"])
