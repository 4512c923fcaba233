"""Split a restore decision (the step to restore and each rank's sources) into the parts that each node needs. Pure
functions.

Usually most ranks already have the state of the step, or all ranks start at step 0. Messages do not list ranks that
have the state already or start at step 0. Every other rank is listed, with its sources, in the message to the rank's
own node, and in the messages to nodes whose ranks send their state to this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Literal

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.snapshot.select import Decision


class DecisionParts:
    """A restore decision, split into one part for each node.

    Args:
        nodes: maps each rank to its node.
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
        """Yield each different part of the decision, with the list of nodes to which this part must be sent."""
        yield self._part({}), [node for node in nodes if node not in self._sources]
        for node in nodes:
            if node in self._sources:
                yield self._part(self._sources[node]), [node]

    def _part(self, sources: dict[int, tuple[c.RestoreSource, ...]]) -> c.RestoreDecision:
        return c.RestoreDecision(
            step=self._step, sources=sources, others=self._others, save_id=self._save_id, stored=self._stored
        )
