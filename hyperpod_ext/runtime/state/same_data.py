"""Whether all ranks read the same samples in the same order: asked at the very start, before the first step.

Where a state is restored, each rank compares with what was saved. At the start nothing is saved yet, and ranks whose
data differ would train on some samples twice and never on others, and nobody would notice.
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
"""By the name of each position in data: what must be the same on every rank."""


class Keys(Protocol):
    """What of a store is needed here."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...


def data_positions_of(states: Iterable[tuple[str, Any]]) -> DataPositions:
    """Of the states of all objects, by name: what is compared of those that are positions in data."""
    return {
        name: {key: state[key] for key in _SAME}
        for name, state in states
        if isinstance(state, dict) and all(isinstance(state.get(key), str | int) for key in _SAME)
    }


def check_same_data(keys: Keys, rank: int, world_size: int, positions: DataPositions) -> None:
    """Compare with all other ranks, by way of rank 0. Collective; only rank 0 waits, and raises for all.

    Raises:
        JobFailedError: they differ.
        ConnectionError: the generation is over.
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
    """What differs from rank to rank, and on which; empty: nothing."""
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
