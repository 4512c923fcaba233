"""Rank 0's part in a generation: the step that all go on from, and where each gets it. Pure but for one question.

Under our agent a coordinator outside of the ranks decides so (`membership/membership.py`); here there is none, and a
launcher decides who is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import NoCheckpointError, UnreachableError
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.snapshot.select import Decision, Offer, Place, choose_step, place_of, start_fresh


@dataclass
class Council:
    """One generation's decisions.

    Args:
        nodes: node of each rank.
        ask_durable: what the durable tiers hold, besides what was refused; None: there are none.
    """

    nodes: Mapping[int, int]
    ask_durable: Callable[[Sequence[tuple[str, str]]], Mapping[str, Any]] | None = None
    generation: int = 0
    committed: int = 0
    """Newest step that some rank has seen committed."""
    began: dict[int, int] = field(default_factory=dict)
    """Step at which each generation of this run went on."""
    decision: Decision | None = None
    _offers: list[Offer] = field(default_factory=list)
    _stored: list[Offer] | None = None
    _unreachable: tuple[str, ...] = ()
    _problems: tuple[str, ...] = ()
    _refused: set[Place] = field(default_factory=set)

    def begin(self, said: Sequence[Mapping[str, Any]]) -> Decision:
        """From what every rank says when it joins: `live`, `held` (of its node, by its first rank), `committed`,
        `began`, `generation`, `error`.

        Raises:
            NoCheckpointError: steps were made, and none of them can be had.
            UnreachableError: a tier that may hold a newer one cannot be asked.
            HyperpodExtError: what kept a rank from joining.
        """
        for one in said:
            if one["error"] is not None:
                raise error_of(one["error"])
        for rank, one in enumerate(said):
            node = self.nodes[rank]
            if one["live"] is not None:
                self._offers.append(Offer("live", rank=rank, node=node, **one["live"]))
            self._offers += [Offer.of_memory(brief, node) for brief in one["held"]]
            self.committed = max(self.committed, int(one["committed"]))
            self.began |= {int(generation): int(step) for generation, step in one["began"].items()}
        known = [int(one["generation"]) for one in said]
        known += [int(brief["generation"]) for one in said for brief in one["held"]]
        if not self.began:
            self._ask()
        self.generation = max(*known, self.generation) + 1
        return self._decide("")

    def refuse(self, errors: Mapping[int, str]) -> Decision:
        """The next best, now that these ranks could not restore from what was chosen for them.

        Raises:
            NoCheckpointError: there is none; with the last error.
        """
        assert self.decision is not None
        # whoever loaded something for this try no longer holds the live state it came with
        changed = {rank for rank, sources in self.decision.sources.items() if sources[0].kind != "self"}
        self._offers = [offer for offer in self._offers if offer.tier != "live" or offer.rank not in changed]
        for rank in errors:
            self._refused |= {place_of(source, self.nodes) for source in self.decision.sources[rank]}
        rank, error = min(errors.items())
        return self._decide(f"rank {rank}: {error}")

    def _decide(self, last_try: str) -> Decision:
        decided = self._choose()
        if decided is None or decided.step < self.committed:
            self._ask()
            decided = self._choose()
        short = decided is None or decided.step < self.committed
        if self._unreachable and (short or not self.began):
            raise UnreachableError(
                f"{'; '.join(self._unreachable)}. It may have a newer checkpoint than the others.",
                hint="Start the job again when the tier can be read, or without it in checkpoint.tiers.",
            )
        if decided is None and self.committed == 0 and not self._offers and not self._problems:
            decided = start_fresh(self.nodes)  # where something is held, to begin anew would be to lose it unasked
        if decided is None:
            raise NoCheckpointError(
                self._nothing(last_try),
                hint="Look at the tiers with `hp-ext checkpoints list`; a peer or a durable one in checkpoint.tiers "
                "survives this. To start from nothing, give the job another name.",
            )
        self.decision = decided
        return decided

    def _choose(self) -> Decision | None:
        offers = [*self._offers, *(self._stored or [])]
        allowed = [o for o in offers if o.place not in self._refused]
        return choose_step(allowed, self.nodes, self.began)

    def _ask(self) -> None:
        """What the durable tiers hold besides what has been refused."""
        if self.ask_durable is None:
            return
        refused = [(url, save_id) for _, rank, _, save_id, url in self._refused if rank < 0]
        found = self.ask_durable(refused)
        self._stored = [Offer.of_all(brief) for brief in found["checkpoints"]]
        self._problems, self._unreachable = tuple(found["problems"]), tuple(found["unreachable"])
        if not self.began:  # writers of earlier runs are older than this one
            self.generation = max(self.generation, int(found["generation"]))

    def _nothing(self, last_try: str) -> str:
        seen = sorted({f"{o.tier} step {o.step}" for o in (*self._offers, *(self._stored or []))})
        newest = f"the newest committed was {self.committed}" if self.committed else "none was committed in this run"
        said = f"No step that all {len(self.nodes)} ranks can restore; {newest}. Seen: {', '.join(seen) or 'nothing'}."
        said += f" Not readable: {'; '.join(self._problems)}." if self._problems else ""
        return f"{said} The last try: {last_try}" if last_try else said
