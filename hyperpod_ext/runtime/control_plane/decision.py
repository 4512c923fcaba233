"""Rank 0's part in a generation: the step that all go on from, and where each gets it. Pure but for one question.

Under our agent a coordinator outside of the ranks does so (`coordinator/coordinator.py`); here there is none, and a
launcher decides who is in. Both negotiate alike (`membership/restoring.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyperpod_ext.runtime.membership.actions import AskDurable, Fail
from hyperpod_ext.runtime.membership.restoring import RestoreNegotiation
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.snapshot.select import Decision, Offer

AskTiers = Callable[[Sequence[tuple[str, str]]], Mapping[str, Any]]


class RestoreCoordinator:
    """One generation's decisions.

    Args:
        nodes: node of each rank.
        ask_durable: what the durable tiers that nodes share hold, besides what was refused; None: there are none.
        run: this run of the job.
    """

    def __init__(self, nodes: Mapping[int, int], ask_durable: AskTiers | None = None, run: str = "") -> None:
        self._nodes, self._ask_durable, self._run = nodes, ask_durable, run
        self._restoring = RestoreNegotiation(durable=ask_durable is not None, outlives_run=True)
        self._committed, self._began = 0, dict[int, int]()
        self.generation = 0

    def begin(self, answers: Sequence[Mapping[str, Any]]) -> Decision:
        """From what every rank says when it joins: `live`, `held` (of its node, by its first rank), `committed`,
        `began`, `generation`, `error`.

        Raises:
            NoCheckpointError: steps were made, and none of them can be had.
            UnreachableError: a tier that may hold a newer one cannot be asked.
            HyperpodExtError: what kept a rank from joining.
        """
        for one in answers:
            if one["error"] is not None:
                raise error_of(one["error"])
        held: dict[int, list[Offer]] = {}
        for rank, one in enumerate(answers):
            node = self._nodes[rank]
            live = one["live"] and Offer("live", rank=rank, node=node, **one["live"])
            self._restoring.join(rank, live)
            its = held.setdefault(node, [])
            its += [Offer.of_memory(summary, node) for summary in one["held"]]
            its += [Offer.of_disk(summary, node, self._run) for summary in one.get("disk", ())]
            self._committed = max(self._committed, int(one["committed"]))
            self._began |= {int(generation): int(step) for generation, step in one["began"].items()}
        for node, offers in held.items():
            self._restoring.hold(node, offers)
        known = [int(one["generation"]) for one in answers]
        known += [int(summary["generation"]) for one in answers for summary in one["held"]]
        decision = self._decide()
        self.generation = max(*known, self.generation) + 1
        return decision

    def refuse(self, errors: Mapping[int, str]) -> Decision:
        """The next best, now that these ranks could not restore what was decided for them.

        Raises:
            NoCheckpointError: there is none; with the last error.
        """
        self._restoring.refuse(errors, self._nodes)
        return self._decide()

    def _decide(self) -> Decision:
        decided = self._restoring.decide(self._nodes, self._began, self._committed)
        while isinstance(decided, AskDurable):
            self._look_at_durable(decided)
            decided = self._restoring.decide(self._nodes, self._began, self._committed)
        if isinstance(decided, Fail):
            raise error_of({"code": decided.code, "message": decided.message, "hint": decided.hint})
        return decided

    def _look_at_durable(self, question: AskDurable) -> None:
        assert self._ask_durable is not None
        found = self._ask_durable(question.exclude)
        if not self._began:  # writers of earlier runs are older than this one
            self.generation = max(self.generation, int(found["generation"]))
        stored = [Offer.of_all(summary) for summary in found["checkpoints"]]
        self._restoring.durable_answered(stored, tuple(found["problems"]), tuple(found["unreachable"]))
