"""Check before the first step that all ranks register the same objects, and read the same samples in the same order.

At a restore, each rank compares its objects and data with the saved state. At the start of a job there is no saved
state to compare with. Without this check, ranks with different data would silently train on some samples twice and on
other samples never.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from hyperpod_ext.errors import JobFailedError

_SAME = ("fingerprint", "order", "seed")
"""Keys of the values in a data loader's saved position that must be equal on every rank."""
FOR_EVER = timedelta(days=14)
_NAMED = 8

DataPositions = Mapping[str, Mapping[str, Any]]
"""By object name: the values that must be equal on every rank. Objects other than data loaders have an empty dict."""


class Keys(Protocol):
    """The methods of a `torch.distributed.Store` that `check_same_data` needs."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...


def data_positions_of(states: Iterable[tuple[str, Any]]) -> DataPositions:
    """Return the values to compare between ranks, by object name."""
    return {name: {key: state[key] for key in _SAME} if _is_position(state) else {} for name, state in states}


def _is_position(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(state.get(key), str | int) for key in _SAME)


def check_same_data(keys: Keys, rank: int, world_size: int, positions: DataPositions) -> None:
    """Compare `positions` between all ranks. Collective, through the store: rank 0 reads the positions of all ranks.

    Ranks other than 0 do not wait for the result. If the ranks differ, rank 0 raises an error, which fails the job.

    Args:
        keys: the store that all ranks share.
        rank: this process's rank.
        world_size: number of ranks.
        positions: this rank's values, from `data_positions_of`.

    Raises:
        JobFailedError: the ranks have registered different objects or data.
        ConnectionError: the generation ended while rank 0 waited.
    """
    if rank:
        keys.set(f"hpx-data-{rank}/0", json.dumps(positions))
        return
    names = [f"hpx-data-{other}/0" for other in range(1, world_size)]
    keys.wait(names, FOR_EVER)
    if problem := difference([positions, *(json.loads(keys.get(name)) for name in names)]):
        raise JobFailedError(
            problem,
            hint="Register the same objects on every rank. Give every rank the same samples, in the same order. The "
            "loader divides the samples among ranks.",
        )


def difference(positions: Sequence[DataPositions]) -> str:
    """Return a sentence on the first difference between the ranks' positions; empty if all are equal."""
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
                return f"restore({name}=...): the {key} of the data differs between ranks: {', '.join(groups)}"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
