"""Split a restore decision into the parts that each node needs. Pure functions.

Usually most ranks already have the step, or all start from nothing. This common case is sent once, without a list of
ranks. For all other ranks, a node gets the sources of its own ranks, and of ranks to which its ranks send their state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Literal

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.snapshot.select import Decision


class DecisionParts:
    """One decision, split by node.

    Args:
        nodes: node of each rank.
    """

    def __init__(self, decision: Decision, nodes: Mapping[int, int]) -> None:
        first = [several[0] for several in decision.sources.values()]
        self._step, self._stored = decision.step, tuple(decision.stored)
        self._others: Literal["self", "fresh"] = "fresh" if all(one.kind == "fresh" for one in first) else "self"
        own = next((one.save_id for one in first if one.kind == "self"), "")
        self._save_id = own if self._others == "self" else ""
        self._sources: dict[int, dict[int, tuple[c.RestoreSource, ...]]] = {}
        for rank, several in decision.sources.items():
            if len(several) == 1 and (several[0].kind, several[0].save_id) == (self._others, self._save_id):
                continue
            sources = tuple(c.RestoreSource(**asdict(source)) for source in several)
            senders = {nodes[source.rank] for source in several if source.kind == "live"}
            for node in {nodes[rank], *senders}:
                self._sources.setdefault(node, {})[rank] = sources

    def parts(self, nodes: Collection[int]) -> Iterator[tuple[c.RestoreDecision, list[int]]]:
        """Yield the parts of the decision, each with the nodes that need exactly this part."""
        yield self._part({}), [node for node in nodes if node not in self._sources]
        for node in nodes:
            if node in self._sources:
                yield self._part(self._sources[node]), [node]

    def _part(self, sources: dict[int, tuple[c.RestoreSource, ...]]) -> c.RestoreDecision:
        return c.RestoreDecision(
            step=self._step, sources=sources, others=self._others, save_id=self._save_id, stored=self._stored
        )
