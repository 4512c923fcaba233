"""Which snapshot of a job that ends is worth bringing to a durable tier. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def newest_of_all(held: Mapping[int, Collection[Mapping[str, Any]]], world_size: int) -> str:
    """Save id of the newest snapshot that every rank has on its own node; empty: there is none."""
    ranks: dict[tuple[int, int, str], set[int]] = {}
    for brief in (brief for briefs in held.values() for brief in briefs):
        if not brief["replica"] and brief["world_size"] == world_size:
            ranks.setdefault((brief["step"], brief["generation"], brief["save_id"]), set()).add(brief["rank"])
    return max((commit for commit, having in ranks.items() if len(having) == world_size), default=(0, 0, ""))[2]
