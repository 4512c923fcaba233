"""Phases of a job that still runs, as its events come: for meters. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.runtime.events.phases import Facts, Span, Teller, concerns, moment_of

_REMEMBERED_STEPS = 4096
"""Steps of a running job whose making is known."""


class LivePhases:
    """Spans while the job runs. What nobody can know yet, such as that a step will be made again, is not in them."""

    def __init__(self) -> None:
        self._facts: Facts | None = None
        self._tellers: dict[int, Teller] = {}

    def tell(self, event: Mapping[str, Any]) -> list[Span]:
        """Take in an event, in the order of the log; returns the spans that end with it."""
        if self._facts is None:
            self._facts = Facts(moment_of(event), math.inf, {}, (), (), math.inf)
        facts, kind = self._facts, event["event"]
        if kind in ("killed", "injected"):
            facts.struck = (*facts.struck[-8:], moment_of(event))
        elif kind == "step":
            facts.first_step = min(facts.first_step, float(event["began"]))
            self._generations(facts.last_making, int(event["step"]), int(event["generation"]))
        elif kind == "generation" and "world_size" in event:
            for rank in [rank for rank in self._tellers if rank >= event["world_size"]]:
                del self._tellers[rank]
        if kind in ("worker_started", "joined") and event["rank"] not in self._tellers:
            self._tellers[event["rank"]] = Teller(event["rank"], facts)
            if facts.first_step < math.inf:  # before that it was not there
                self._tellers[event["rank"]].begin_at(moment_of(event))
        every = kind in ("generation", "fault")
        tellers = (
            self._tellers.values() if every else [self._tellers[r] for r in [event.get("rank")] if r in self._tellers]
        )
        ended = []
        for teller in tellers:
            if concerns(event, teller.rank):
                teller.tell(event)
                ended += teller.take()
        return ended

    @staticmethod
    def _generations(making: dict[int, int], step: int, generation: int) -> None:
        """Remember which generation made a step last; of long ago, nobody reports any more."""
        making[step] = max(making.pop(step, 0), generation)
        if len(making) > _REMEMBERED_STEPS:
            del making[next(iter(making))]
