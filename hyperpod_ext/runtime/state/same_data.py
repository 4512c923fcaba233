"""Check before the first step that all ranks register the same objects, and read the same samples in the same order.

At a restore, each rank compares its objects and data with the saved state. At the start there is no saved state, and
ranks with different data would silently train on some samples twice and on others never.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from hyperpod_ext.errors import JobFailedError

_SAME = ("fingerprint", "order", "seed")
FOR_EVER = timedelta(days=14)
_NAMED = 8

DataPositions = Mapping[str, Mapping[str, Any]]
"""Values that must be equal on every rank, by the name of each object: those of positions in data; none of others."""


class Keys(Protocol):
    """The needed methods of a store."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...


def data_positions_of(states: Iterable[tuple[str, Any]]) -> DataPositions:
    """Return the values to compare, by object name."""
    return {name: {key: state[key] for key in _SAME} if _is_position(state) else {} for name, state in states}


def _is_position(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(state.get(key), str | int) for key in _SAME)


def check_same_data(keys: Keys, rank: int, world_size: int, positions: DataPositions) -> None:
    """Compare with all other ranks through rank 0. Collective; only rank 0 waits, and raises for all.

    Raises:
        JobFailedError: the ranks differ.
        ConnectionError: the generation has ended.
    """
    if rank:
        keys.set(f"hpx-data-{rank}/0", json.dumps(positions))
        return
    names = [f"hpx-data-{other}/0" for other in range(1, world_size)]
    keys.wait(names, FOR_EVER)
    if problem := difference([positions, *(json.loads(keys.get(name)) for name in names)]):
        raise JobFailedError(
            problem,
            hint="Register the same objects on every rank. Give every rank the same samples, in the same order; the "
            "loader shares them.",
        )


def difference(positions: Sequence[DataPositions]) -> str:
    """Return a sentence on the first difference between ranks; empty without one."""
    for name in sorted({name for one in positions for name in one}):
        if missing := [rank for rank, one in enumerate(positions) if name not in one]:
            known = [rank for rank, one in enumerate(positions) if name in one]
            return f"{name} is registered on {_listed(known)}, and not on {_listed(missing)}"
        for key in _SAME:
            ranks = defaultdict[str, list[int]](list)
            for rank, one in enumerate(positions):
                ranks[repr(one[name].get(key))].append(rank)
            if len(ranks) > 1:
                groups = [
                    f"{value} on {_listed(its)}" for value, its in sorted(ranks.items(), key=lambda item: item[1])
                ]
                return f"restore({name}=...) has another {key} of the data from rank to rank: {', '.join(groups)}"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
