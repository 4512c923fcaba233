"""Rank 0's decision for a generation: the step that all ranks restore, and the source from which each rank restores.

The functions are pure, except for requests to the durable tiers. Under our agent, the coordinator makes the decision
(`coordinator/coordinator.py`). Under another launcher and in a plain script (`dcp/tiers.py`), rank 0 makes the
decision. The coordinator and rank 0 use the same code (`membership/restoring.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hyperpod_ext.runtime.membership.actions import AskDurable, Fail
from hyperpod_ext.runtime.membership.restoring import RestoreNegotiation
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.memory_server.protocol.requests import Snapshots
from hyperpod_ext.runtime.snapshot.select import Decision, Offer, OfferKey

_NOTHING: dict[str, Any] = {"live": None, "held": (), "disk": (), "committed": 0, "began": {}, "generation": 0}
AskTiers = Callable[[Sequence[tuple[str, str]]], Mapping[str, Any]]


def offers_of(held: Snapshots, generation: int) -> dict[str, Any]:
    """Return a node's fields of an answer for `RestoreCoordinator.begin`: its snapshots and its newest generation."""
    disk = held.disk
    newest = max(generation, int(disk.get("generation", 0)))
    return {"held": held.snapshots, "disk": disk.get("snapshots", ()), "generation": newest}


class RestoreCoordinator:
    """Decides, on rank 0, what the ranks of one generation restore.

    Args:
        nodes: number of the node of each rank.
        ask_durable: function that returns the checkpoints in shared durable tiers, except the checkpoints in its
            argument; None without such tiers.
        run: name of this run of the job.
        script: whether the training script loads the state itself, instead of the `@resilient` loop, and may start from
            step 0 if no checkpoint can be restored.
        step: step that the script wants to restore; None for the newest step.
    """

    def __init__(
        self,
        nodes: Mapping[int, int],
        ask_durable: AskTiers | None = None,
        run: str = "",
        *,
        script: bool = False,
        step: int | None = None,
    ) -> None:
        self._nodes, self._ask_durable, self._run = nodes, ask_durable, run
        self._restoring = RestoreNegotiation(
            durable=ask_durable is not None, outlives_run=True, starts_over=script, step=step
        )
        self._committed, self._began = 0, dict[int, int]()
        self.generation = 0

    def begin(self, answers: Sequence[Mapping[str, Any]]) -> Decision:
        """Return the first decision of a new generation.

        Args:
            answers: one dict per rank, in the order of ranks, with `live`, `committed`, `began`, `generation` and
                `error`. The answer of a node's first rank also has `held` and `disk`. All fields of an answer are
                optional.

        Raises:
            NoCheckpointError: training has made steps, but none of them can be restored.
            UnreachableError: a tier that may have a newer step is unreachable.
            HyperpodExtError: a rank has reported an error that keeps it from joining.
        """
        answers = [{**_NOTHING, **one} for one in answers]
        if errors := [one["error"] for one in answers if one.get("error")]:
            raise error_of(errors[0])
        held: dict[int, list[Offer]] = {}
        for rank, one in enumerate(answers):
            node = self._nodes[rank]
            live = one["live"] and Offer("live", rank=rank, node=node, **one["live"])
            self._restoring.join(rank, live)
            its = held.setdefault(node, [])
            its += [Offer.of_memory(summary, node) for summary in one["held"]]
            its += [Offer.of_disk(summary, node, self._run) for summary in one["disk"]]
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
        """Return the next decision after a failed restore. `errors`: error of each rank that could not restore.

        Raises:
            NoCheckpointError: no other source is left to restore from. The exception's message contains the last error.
        """
        self._restoring.refuse(errors, self._nodes)
        return self._decide()

    def refuse_offers(self, refused: Collection[OfferKey], error: str) -> Decision:
        """Return the next decision after the offers (restorable snapshots) in `refused` could not be restored.

        Raises:
            NoCheckpointError: no other source is left to restore from. The exception's message contains `error`.
        """
        self._restoring.refuse_offers(refused, error)
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
        if not self._began:  # this run needs higher generation numbers than earlier runs
            self.generation = max(self.generation, int(found["generation"]))
        stored = [Offer.of_all(summary) for summary in found["checkpoints"]]
        self._restoring.durable_answered(stored, tuple(found["problems"]), tuple(found["unreachable"]))
