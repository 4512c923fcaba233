"""Age of the catalog's data files. Files become outdated because AWS often adds instance types, regions and
versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from hyperpod_ext.catalog import facts

MOST_DAYS = 180
"""Days after which a data file is reported as outdated. AWS offers a new instance type with accelerators about twice a
year."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Age:
    """Age of one data file of the catalog."""

    file: str
    """Name of the file, such as `zones.json`."""
    dated: str
    """Date of the file's oldest facts, such as 2026-11-24."""
    days: int
    """Number of days from `dated` until today."""


def ages(today: date) -> Iterator[Age]:
    """Yield the age of every data file of the catalog, sorted by file name."""
    for file in sorted(_FOLDER.glob("*.json")):
        dated = _dated(facts(file.name))
        yield Age(file.name, str(dated), (today - dated).days)


def stale(today: date) -> list[Age]:
    """Return the data files whose oldest facts are more than MOST_DAYS days old."""
    return [one for one in ages(today) if one.days > MOST_DAYS]


def _dated(known: dict[str, Any]) -> date:
    """Return the date of a data file. If the file has only dates of its sources, return the oldest date."""
    days = [known["dated"]] if "dated" in known else [source["dated"] for source in known["sources"].values()]
    return min(date.fromisoformat(day) for day in days)
