"""One exchange of all ranks of a generation, over the store that they share: rank 0 hears all, and answers all.

Ranks form a tree, so that none of them, not even rank 0, has many others to talk to: each hears `FAN_OUT` others at
most, hands on what they and those below them say, and hands the answer back.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.process_group.store import GenerationOverError, PartitionedStore

Decide = Callable[[Sequence[Any]], Any]
"""From what every rank has said, by rank, to what all of them are answered."""
FAN_OUT = 16
_LEVEL_S = 2.0
"""How much longer each level of the tree waits than those below it, who tell it which rank is missing."""


def parent_of(rank: int) -> int:
    """Who hears what `rank` says; rank 0 has nobody but itself."""
    return max(0, (rank - 1) // FAN_OUT)


def children_of(rank: int, world_size: int) -> range:
    """Whom `rank` hears."""
    first = rank * FAN_OUT + 1
    return range(min(first, world_size), min(first + FAN_OUT, world_size))


def spread(store: PartitionedStore, key: str, rank: int, world_size: int) -> None:
    """Set `KEY/RANK` of the parent and of each child of `rank`. When every rank that hears it does the same, all know,
    and none needs a connection to all others."""
    for other in [*([parent_of(rank)] if rank else []), *children_of(rank, world_size)]:
        with contextlib.suppress(ConnectionError):  # it has gone, or is in the next generation already
            store.set(f"{key}/{other}", "")


def levels_below(rank: int, world_size: int) -> int:
    """Levels of the tree below `rank`; 0: it hears nobody."""
    levels = 0
    while below := children_of(rank, world_size):
        rank, levels = below[0], levels + 1
    return levels


@dataclass(slots=True)
class _Heard:
    """What a rank and those below it say."""

    values: dict[int, Any]
    missing: dict[int, str]
    """Ranks of which there is no report, and why."""

    def add(self, other: Mapping[str, Mapping[str, Any]]) -> None:
        self.values |= {int(rank): value for rank, value in other["values"].items()}
        self.missing |= {int(rank): str(why) for rank, why in other["missing"].items()}


class Exchange:
    """One rank's part in it. What a rank reports lies in its parent's server, its answer in its own: so a rank that has
    its answer, and has handed it on, needs no other any more."""

    def __init__(self, store: PartitionedStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s

    def ask(self, what: str, value: Any, decide: Decide, timeout_s: float | None = None) -> Any:
        """Say `value` under the name `what`; all ranks must. Rank 0's `decide` makes the answer of all.

        Raises:
            HyperpodExtError: what `decide` raised, on every rank.
            GenerationOverError: the generation ended first, or somebody has not spoken in time.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        heard = self._hear(what, value, limit_s)
        if self._rank == 0:
            text = json.dumps(_answer_to(heard, decide))
        else:
            report = json.dumps({"values": heard.values, "missing": heard.missing})
            self._store.set(f"hpx-{what}-from-{self._rank}/{parent_of(self._rank)}", report)
            text = self._read(f"hpx-{what}/{self._rank}", limit_s + _LEVEL_S * (1 + levels_below(0, self._world_size)))
        gone = self._hand_on(what, text, heard)
        answer = json.loads(text)
        if "missing" in answer:
            raise GenerationOverError(answer["missing"])
        if gone is not None:
            raise gone
        if "error" in answer:
            raise error_of(answer["error"])
        return answer["answer"]

    def _hear(self, what: str, value: Any, limit_s: float) -> _Heard:
        heard = _Heard({self._rank: value}, {})
        until = time.monotonic() + limit_s + _LEVEL_S * (levels_below(self._rank, self._world_size) - 1)
        for child in children_of(self._rank, self._world_size):
            try:
                text = self._read(f"hpx-{what}-from-{child}/{self._rank}", max(0.0, until - time.monotonic()))
                heard.add(json.loads(text))
            except GenerationOverError as error:  # where it is over indeed, the next call says so, too
                heard.missing[child] = f"has not spoken in time: {error}"
            except (ValueError, TypeError, KeyError, AttributeError):
                heard.missing[child] = "reports what cannot be read; does it run another version of hyperpod_ext?"
        return heard

    def _hand_on(self, what: str, text: str, heard: _Heard) -> ConnectionError | None:
        """To those that this rank has heard; where one is gone, which is returned, the others still have the answer."""
        gone = None
        for child in children_of(self._rank, self._world_size):
            if child in heard.missing:
                continue
            try:
                self._store.set(f"hpx-{what}/{child}", text)
            except ConnectionError as error:
                gone = error
        return gone

    def _read(self, key: str, limit_s: float) -> str:
        self._store.wait([key], timedelta(seconds=limit_s))
        return self._store.get(key).decode()


def _answer_to(heard: _Heard, decide: Decide) -> dict[str, Any]:
    if heard.missing:
        named = ", ".join(str(rank) for rank in sorted(heard.missing))
        return {"missing": f"rank {named} {heard.missing[min(heard.missing)]}"}
    try:
        return {"answer": decide([heard.values[rank] for rank in sorted(heard.values)])}
    except HyperpodExtError as error:
        return {"error": error.to_json()}
