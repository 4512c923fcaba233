"""One exchange of all ranks of a generation, over the store that they share: rank 0 hears all, and answers each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.process_group.store import PartitionedStore

Decide = Callable[[Sequence[Any]], Any]
"""From what every rank has said, by rank, to what all of them are answered."""


class Exchange:
    """One rank's part in it. Reports lie in rank 0's server, the answer to each rank in that rank's own: so a rank that
    has its answer needs no other any more."""

    def __init__(self, store: PartitionedStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s

    def ask(self, what: str, value: Any, decide: Decide, timeout_s: float | None = None) -> Any:
        """Say `value` under the name `what`; all ranks must. Rank 0's `decide` makes the answer of all.

        Raises:
            HyperpodExtError: what `decide` raised, on every rank.
            GenerationOverError: the generation ended first, or somebody has not spoken in time.
        """
        limit = timedelta(seconds=timeout_s or self._timeout_s)
        self._store.set(f"hpx-{what}-from-{self._rank}/0", json.dumps(value))
        if self._rank == 0:
            self._answer(what, decide, limit)
        answer = self._read(f"hpx-{what}/{self._rank}", limit)
        if "error" in answer:
            raise error_of(answer["error"])
        return answer["answer"]

    def _answer(self, what: str, decide: Decide, limit: timedelta) -> None:
        answers = [self._read(f"hpx-{what}-from-{rank}/0", limit) for rank in range(self._world_size)]
        try:
            answer = {"answer": decide(answers)}
        except HyperpodExtError as error:
            answer = {"error": error.to_json()}
        text = json.dumps(answer)
        for rank in range(self._world_size):
            self._store.set(f"hpx-{what}/{rank}", text)

    def _read(self, key: str, limit: timedelta) -> Any:
        self._store.wait([key], limit)
        return json.loads(self._store.get(key))
