"""Check before the first step that all ranks read the same samples in the same order.

At a restore, each rank compares its data with the saved state. At the start there is no saved state, and ranks with
different data would silently train on some samples twice and on others never.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from hyperpod_ext.errors import JobFailedError

_SAME = ("fingerprint", "order", "seed")
_FOR_EVER = timedelta(days=14)
_NAMED = 8

DataPositions = Mapping[str, Mapping[str, Any]]
"""Values that must be equal on every rank, by the name of each position in data."""


class Keys(Protocol):
    """The needed methods of a store."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...


def data_positions_of(states: Iterable[tuple[str, Any]]) -> DataPositions:
    """Return the values to compare, of the states that are positions in data, by object name."""
    return {
        name: {key: state[key] for key in _SAME}
        for name, state in states
        if isinstance(state, dict) and all(isinstance(state.get(key), str | int) for key in _SAME)
    }


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
    keys.wait(names, _FOR_EVER)
    if problem := difference([positions, *(json.loads(keys.get(name)) for name in names)]):
        raise JobFailedError(
            problem, hint="Give every rank the same samples, in the same order; the loader shares them."
        )


def difference(positions: Sequence[DataPositions]) -> str:
    """Return a sentence on the first difference between ranks; empty without one."""
    for name in sorted({name for one in positions for name in one}):
        for key in _SAME:
            ranks = defaultdict[str, list[int]](list)
            for rank, one in enumerate(positions):
                ranks[repr(one[name][key]) if name in one else "none"].append(rank)
            if len(ranks) > 1:
                groups = [
                    f"{value} on {_listed(its)}" for value, its in sorted(ranks.items(), key=lambda item: item[1])
                ]
                return f"restore({name}=...) has another {key} of the data from rank to rank: {', '.join(groups)}"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
