"""Collects a value from every rank of a generation on rank 0, and sends rank 0's answer to all, through their store.

The ranks form a tree, so that no rank, not even rank 0, communicates with many others. Each rank collects the values of
its at most `FAN_OUT` children and their subtrees, and sends them to its parent. Later each rank forwards rank 0's
answer to its children.
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
"""Computes one answer for all ranks from the values of all ranks, given in the order of ranks."""
FAN_OUT = 16
_LEVEL_S = 2.0
"""Additional seconds that a level of the tree waits compared with the level below, so that the lower level can report
missing ranks first."""


def parent_of(rank: int) -> int:
    """Return the rank to which `rank` sends its report. The parent of rank 0 is rank 0 itself."""
    return max(0, (rank - 1) // FAN_OUT)


def children_of(rank: int, world_size: int) -> range:
    """Return the ranks that send their reports to `rank`."""
    first = rank * FAN_OUT + 1
    return range(min(first, world_size), min(first + FAN_OUT, world_size))


def spread(store: PartitionedStore, key: str, rank: int, world_size: int) -> None:
    """Set the key `KEY/RANK` in the servers of the parent and of each child of `rank`.

    If every rank calls this when its own key is set, the notice reaches all ranks, with few connections per rank.
    """
    for other in [*([parent_of(rank)] if rank else []), *children_of(rank, world_size)]:
        with contextlib.suppress(ConnectionError):  # `other` may have ended or be in the next generation
            store.set(f"{key}/{other}", "")


def levels_below(rank: int, world_size: int) -> int:
    """Return the number of levels of the tree below `rank`: 0 if `rank` has no children."""
    levels = 0
    while below := children_of(rank, world_size):
        rank, levels = below[0], levels + 1
    return levels


@dataclass(slots=True)
class _Collected:
    """The values collected from a rank and its subtree."""

    values: dict[int, Any]
    missing: dict[int, str]
    """Reason why a value is missing, by rank."""

    def add(self, other: Mapping[str, Mapping[str, Any]]) -> None:
        self.values |= {int(rank): value for rank, value in other["values"].items()}
        self.missing |= {int(rank): str(why) for rank, why in other["missing"].items()}


class Exchange:
    """One rank's part in exchanges with all other ranks.

    A rank stores its report in its parent's server, and the parent stores the answer in the rank's own server. So a
    rank that has read and forwarded rank 0's answer needs no other rank any more.
    """

    def __init__(self, store: PartitionedStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s

    def ask(self, what: str, value: Any, decide: Decide, timeout_s: float | None = None) -> Any:
        """Send `value` under the name `what`, and return rank 0's answer. All ranks must call this with the same
        `what`.

        Args:
            decide: function that computes the answer, called only on rank 0.
            timeout_s: time limit for the reports in seconds; None for the default limit of this exchange object.

        Raises:
            HyperpodExtError: `decide` raised this error. The error is raised on every rank.
            GenerationOverError: the generation ended before the answer, or a rank did not report in time.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        collected = self._collect(what, value, limit_s)
        if self._rank == 0:
            text = json.dumps(_answer_to(collected, decide))
        else:
            report = json.dumps({"values": collected.values, "missing": collected.missing})
            self._store.set(f"hpx-{what}-from-{self._rank}/{parent_of(self._rank)}", report)
            text = self._read(f"hpx-{what}/{self._rank}", limit_s + _LEVEL_S * (1 + levels_below(0, self._world_size)))
        gone = self._forward(what, text, collected)
        answer = json.loads(text)
        if "missing" in answer:
            raise GenerationOverError(answer["missing"])
        if gone is not None:
            raise gone
        if "error" in answer:
            raise error_of(answer["error"])
        return answer["answer"]

    def _collect(self, what: str, value: Any, limit_s: float) -> _Collected:
        collected = _Collected({self._rank: value}, {})
        until = time.monotonic() + limit_s + _LEVEL_S * (levels_below(self._rank, self._world_size) - 1)
        for child in children_of(self._rank, self._world_size):
            try:
                text = self._read(f"hpx-{what}-from-{child}/{self._rank}", max(0.0, until - time.monotonic()))
                collected.add(json.loads(text))
            # treat the child as missing; if the generation has really ended, the next call on the store raises again
            except GenerationOverError as error:
                collected.missing[child] = f"has not answered in time: {error}"
            except (ValueError, TypeError, KeyError, AttributeError):
                collected.missing[child] = "sent an invalid report; does it run another version of hyperpod_ext?"
        return collected

    def _forward(self, what: str, text: str, collected: _Collected) -> ConnectionError | None:
        """Send the answer to all children that have reported. Return the error of a child that has ended."""
        gone = None
        for child in children_of(self._rank, self._world_size):
            if child in collected.missing:
                continue
            try:
                self._store.set(f"hpx-{what}/{child}", text)
            except ConnectionError as error:
                gone = error
        return gone

    def _read(self, key: str, limit_s: float) -> str:
        self._store.wait([key], timedelta(seconds=limit_s))
        return self._store.get(key).decode()


def _answer_to(collected: _Collected, decide: Decide) -> dict[str, Any]:
    if collected.missing:
        named = ", ".join(str(rank) for rank in sorted(collected.missing))
        return {"missing": f"rank {named} {collected.missing[min(collected.missing)]}"}
    try:
        return {"answer": decide([collected.values[rank] for rank in sorted(collected.values)])}
    except HyperpodExtError as error:
        return {"error": error.to_json()}
