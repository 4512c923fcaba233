"""Age of the catalog's facts. AWS often adds types, regions and versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from hyperpod_ext.catalog import facts

MOST_DAYS = 180
"""AWS offers a new type of machine with accelerators about twice a year."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Age:
    """One file of facts."""

    file: str
    """Name of the file, `zones.json`."""
    dated: str
    """Day of the file's oldest facts, 2026-11-24."""
    days: int
    """Days from `dated` until today."""


def ages(today: date) -> Iterator[Age]:
    """Yield the age of every file of the catalog, by name."""
    for file in sorted(_FOLDER.glob("*.json")):
        dated = _dated(facts(file.name))
        yield Age(file.name, str(dated), (today - dated).days)


def stale(today: date) -> list[Age]:
    """Return files whose facts are older than MOST_DAYS."""
    return [one for one in ages(today) if one.days > MOST_DAYS]


def _dated(known: dict[str, Any]) -> date:
    """Return the day of the file, or of its oldest source."""
    days = [known["dated"]] if "dated" in known else [source["dated"] for source in known["sources"].values()]
    return min(date.fromisoformat(day) for day in days)
