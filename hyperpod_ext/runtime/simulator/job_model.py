"""The part of a job that a fault affects, with the membership code of a real coordinator.

All ranks that a fault does not affect have equal state, so one rank represents all of them. With `every_rank`, every
rank is simulated; a test checks that this leads to the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeStates
from hyperpod_ext.runtime.simulator.memory import Memory
from hyperpod_ext.runtime.simulator.settings import Simulated
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.snapshot.select import Decision, Offer


@dataclass
class Known:
    """State of a job's membership that is kept from one fault to the next."""

    nodes: dict[int, int]
    """Node of each rank, by rank."""
    spares: set[int]
    generation: int = 1
    committed: int = 0
    began: dict[int, int] = field(default_factory=dict)
    faults: list[m.Fault] = field(default_factory=list)
    losses: dict[int, int] = field(default_factory=dict)
    spares_used: int = 0


class JobModel:
    """One recovery, from its first fault until all ranks continue."""

    def __init__(
        self, settings: Simulated, known: Known, memory: Memory, ranks: Collection[int], live: int | None
    ) -> None:
        self._settings, self._known, self._memory, self._live = settings, known, memory, live
        self._was = {rank: known.nodes[rank] for rank in ranks}
        self._dead: set[int] = set()
        self._lost: set[int] = set()
        self._emptied: set[int] = set()
        """Ranks whose node was lost, so that the node's memory is empty, even if the same node has returned."""
        running = live is not None
        self.membership = Membership(
            self._was,
            settings.budgets,
            durable="durable" in settings.tiers,
            states=NodeStates(self._was.values(), known.spares, known.losses),
            generation=known.generation,
            phase=m.JobPhase.RUNNING if running else m.JobPhase.FORMING,
            faults=known.faults,
            committed=known.committed,
            began=known.began,
            spares_used=known.spares_used,
        )
        self.failed: m.Fail | None = None
        self.waiting: set[int] = set()
        """Lost nodes that must be replaced before the job can continue."""

    def process_died(self, rank: int, at: float) -> None:
        """Record that the process of `rank` died at time `at`, while its node stayed."""
        self._dead.add(rank)
        step = self.membership.committed + 1
        fault = m.Fault(rank, "killed by SIGKILL (9)", step, died=True, kind="signal", at=at)
        self._carry_out(self.membership.fault(fault, self.membership.generation))

    def node_lost(self, node: int, at: float) -> None:
        """Record that a node was lost at time `at`. The lost node may have been a spare."""
        self._lost.add(node)
        gone = {rank for rank, its in self.membership.nodes.items() if its == node}
        self._dead |= gone
        self._emptied |= gone
        self._carry_out(self.membership.node_lost(node, "simulated", at))

    def node_came(self, node: int) -> None:
        """Record that a lost node has returned or was replaced."""
        self._carry_out(self.membership.node_came(node))

    def nobody_came(self, waited_s: float) -> None:
        """Record that no node has replaced the lost nodes within the time limit."""
        for node in sorted(self.waiting):
            self._carry_out(self.membership.no_node_came(node, waited_s))

    def decide(self, moment: float) -> Decision | None:
        """Let all ranks join and restore, and return the decision. Return None if the job cannot continue: see
        `failed`."""
        membership, actions = self.membership, list[m.Action]()
        held = self._held(moment)
        for rank, node in membership.nodes.items():
            actions = membership.join(rank, self._live_offer(rank), held.get(node, []))
            self._carry_out(actions)
        while any(isinstance(action, m.AskDurable) for action in actions):
            actions = membership.durable_answered(self._memory.stored(), self._known.generation - 1, ())
            self._carry_out(actions)
        if self.failed is not None:
            return None
        assert membership.decision is not None, "everybody has joined"
        for rank in membership.nodes:
            actions = membership.restore_reported(rank, membership.generation, membership.attempt, "")
        assert isinstance(actions[0], m.Go)
        self._remember()
        return membership.decision

    @property
    def moved(self) -> dict[int, int]:
        """Node on which each rank was before, for ranks that have moved or whose node's memory is empty."""
        now = self.membership.nodes
        return {rank: node for rank, node in self._was.items() if now[rank] != node or rank in self._emptied}

    def _held(self, moment: float) -> dict[int, list[Offer]]:
        """Return the snapshots in each node's memory: those of its own rank, copies for other ranks, and parity."""
        held: dict[int, list[Offer]] = {}
        for rank, node in self._was.items():
            if node not in self._lost:
                held.setdefault(node, []).extend(self._memory.own(node, rank))
                held[node].extend(self._memory.pieces(node, rank, self._was.keys()))
            for holder in self._memory.holders(node, rank):
                if holder not in self._lost:
                    held.setdefault(holder, []).extend(self._memory.copies(node, holder, rank, moment))
        return held

    def _live_offer(self, rank: int) -> Offer | None:
        if self._live is None or rank in self._dead:
            return None
        generation = self._known.generation
        digest = "" if self._settings.redundant else str(rank)
        node, save_id = self.membership.nodes[rank], save_id_of(generation, self._live)
        return Offer("live", self._live, rank, node, save_id, own_digest=digest, sharing=self._memory.sharing)

    def _carry_out(self, actions: Collection[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Fail():
                    self.failed = action
                case m.AwaitNode(node):
                    self.waiting.add(node)
                case m.TakeOver():
                    unassigned = self.membership.unassigned
                    self.waiting = {self.membership.nodes[rank] for rank in unassigned}
                case m.Decommission(node):
                    ranks = [rank for rank, its in self._was.items() if its == node]
                    held = [offer for rank in ranks for offer in self._memory.own(node, rank)]
                    self._carry_out(self.membership.decommissioned(node, held))

    def _remember(self) -> None:
        known, membership = self._known, self.membership
        known.nodes |= membership.nodes
        known.spares, known.losses = membership.states.spares, membership.states.losses
        known.generation, known.committed = membership.generation, membership.committed
        # keep only the newest generations, because snapshots of earlier ones no longer exist
        known.began = dict(sorted(membership.began.items())[-_GENERATIONS:])
        known.faults, known.spares_used = membership.faults, membership.spares_used


_GENERATIONS = 16


def where_from(decision: Decision, ranks: Mapping[int, int]) -> dict[str, int]:
    """Return how many of these ranks restore from each kind of source."""
    counts: dict[str, int] = {}
    for rank in ranks:
        kind = decision.sources[rank][0].name
        counts[kind] = counts.get(kind, 0) + 1
    return counts
