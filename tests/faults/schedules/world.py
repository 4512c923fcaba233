"""A job in one process: nodes, ranks and the membership that decides for them, driven one event at a time.

What an agent and the coordinator do with the membership's commands is done here in the same order; all that
stores, copies, decides and verifies is the real thing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.slots.slots import Slot
from hyperpod_ext.runtime.snapshot.manifest import generation_of
from hyperpod_ext.runtime.snapshot.select import Decision, Offer

from .node import JOB, Node, Worker
from .oracle import Commit, Copies, Promises, Run, copying_is_uneven, given_up
from .states import START, Kind, Moment

SETTLE_S = 10.0


@dataclass(frozen=True)
class Setting:
    """What a schedule's job is like."""

    nodes: int
    per_node: int
    kind: Kind
    overlap: bool
    when_busy: Literal["wait", "skip", "supersede"]
    memory_every: int
    peer_every: int
    """0: no peer tier."""
    durable_every: int
    """0: no durable tier."""
    keep: int

    def policy(self, folder: Path) -> CheckpointPolicy:
        tiers: list[Any] = [MemoryTier(every_steps=self.memory_every)]
        if self.peer_every:
            tiers.append(PeerTier(every_steps=self.peer_every, streams=1, max_slowdown=1.0))
        if self.durable_every:
            tiers.append(FileTier(path=str(folder / "durable"), every_steps=self.durable_every, keep=self.keep))
        return CheckpointPolicy(tiers=tuple(tiers), overlap=self.overlap, when_busy=self.when_busy)


class Ended(Exception):  # noqa: N818  how a run may rightly end
    """The job could not go on, and nothing was left to go on from."""


class World:
    """One job over all its runs."""

    def __init__(self, rng: random.Random, setting: Setting, folder: Path, say: Callable[[str], None]) -> None:
        self.rng, self.setting, self.folder, self.say = rng, setting, folder, say
        self.policy = setting.policy(folder)
        self.root = folder / "durable" / JOB if setting.durable_every else None
        self.runs: list[Run] = []
        self.graveyard: list[Node] = []
        self.zombies: list[Worker] = []
        self.interrupt: Callable[[str], bool] = lambda where: False
        """Asked while the membership settles; may make a fault then, and says whether it did."""
        self.interrupt_commit: Callable[[int, Moment], bool] = lambda rank, moment: False
        """Asked before a rank commits what it has restored; a fault it makes begins another generation."""
        self.store_fails = False
        """Whether the next that is read of the durable tier cannot be had this once."""
        self.flipped: list[Slot] = []
        """Slots in which a bit has flipped."""
        self.blamed: set[Commit] = set()
        """Commits that were refused without being damaged: nobody need offer them in this generation."""
        self.nodes: dict[int, Node] = {}
        self.workers: dict[int, Worker] = {}

    # --- a run ----------------------------------------------------------------------------------

    def start(self, nodes: int, per_node: int) -> None:
        """A new run of the job: nothing is left but what is durable."""
        self.run = Run(len(self.runs) + 1, os.urandom(8).hex(), nodes * per_node)
        self.runs.append(self.run)
        self.per_node = per_node
        place = {rank: rank // per_node for rank in range(self.run.world_size)}
        self.membership = Membership(place, Budgets(1 << 30), durable=bool(self.policy.durable()))
        self.promises = Promises()
        self.step = 0
        self.begun = self.disturbed = False
        self.joined: set[int] = set()
        self.reported: set[int] = set()
        self.last: m.Begin | m.Restore | None = None
        self.nodes = {number: self._node(number, nodes) for number in range(nodes)}
        self._tell_peers()
        self.workers = {rank: self._worker(rank) for rank in place}
        self.first_seen = self.look()
        self.settle_membership()

    def _node(self, number: int, nodes: int) -> Node:
        return Node(number, nodes, self.per_node, self.policy, self.folder)

    def _worker(self, rank: int) -> Worker:
        node = self.nodes[rank // self.per_node]
        return Worker(rank, self.run.world_size, node, self.setting.kind, self.policy)

    def _tell_peers(self) -> None:
        addresses = {number: node.address for number, node in self.nodes.items()}
        for node in self.nodes.values():
            node.memory.set_peers(addresses, dict.fromkeys(addresses, ""))

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank in range(self.run.world_size) if rank // self.per_node == node]

    def close(self) -> None:
        for worker in (*self.workers.values(), *self.zombies):
            if not worker.dead:
                worker.die()
        everything = [*self.nodes.values(), *self.graveyard]
        for node in everything:
            if not node.lost:
                node.lose()
        for node in everything:
            node.bury()

    # --- what becomes of ranks and nodes ----------------------------------------------------------

    def replace_node(self, number: int) -> None:
        """A node is lost, and an empty one takes its place; its ranks' processes are gone."""
        old = self.nodes[number]
        for rank in self.ranks_of(number):
            if not self.workers[rank].dead:
                self.workers[rank].die()
        old.lose()
        if copying_is_uneven(self.nodes.values(), set(self.workers), self.promises.protected):
            self.promises.protected = None  # the first thing to know in docs/checkpointing.md
        self.disturbed = True
        self.graveyard.append(old)
        self.promises.lost(set(self.ranks_of(number)))
        self.nodes[number] = self._node(number, len(self.nodes))
        self._tell_peers()
        self.say(f"node {number} lost and replaced")

    def died(self, rank: int, generation: int | None = None) -> None:
        """Tell the membership."""
        cause = f"killed by SIGKILL (9), {len(self.membership.faults)}"
        fault = m.Fault(rank, cause, self.step + 1, died=True, kind="signal")
        self.carry_out(self.membership.fault(fault, self.membership.generation if generation is None else generation))

    def raised(self, rank: int) -> None:
        fault = m.Fault(rank, f"ValueError: {len(self.membership.faults)}", self.step + 1, died=False, kind="exception")
        self.carry_out(self.membership.fault(fault, self.membership.generation))

    # --- one step -------------------------------------------------------------------------------

    def train(self, steps: int) -> None:
        """So many steps in which nothing goes wrong."""
        for _ in range(steps):
            moment = self.next_moment()
            order = self.shuffled(self.workers)
            for rank in order:
                self.workers[rank].compute(moment)
            for rank in order:
                self.commit(rank, moment)
            self.step = moment.step

    def next_moment(self) -> Moment:
        """The state that the next step makes."""
        return Moment(self.run.number, self.membership.generation, self.step + 1)

    def commit(self, rank: int, moment: Moment) -> None:
        """A rank has made a step, and saves it if that is due."""
        worker = self.workers[rank]
        self.run.commits[moment.step, worker.generation] = moment
        self.seal_promised(rank)
        if worker.commit(moment):
            self.promises.begins(rank)
            worker.asked = (moment.step, worker.generation)
        self.membership.step_committed(moment.step)

    def seal_promised(self, rank: int) -> None:
        """What was asked for counts as sealed when the next save begins, and when the generation is left."""
        worker = self.workers[rank]
        if worker.asked is not None:
            self.promises.sealed(rank, worker.asked)
            worker.asked = None

    def shuffled(self, ranks: Any) -> list[int]:
        order = sorted(ranks)
        self.rng.shuffle(order)
        return order

    # --- the membership's commands --------------------------------------------------------------

    def carry_out(self, commands: list[m.Action]) -> None:
        for command in commands:
            match command:
                case m.Abort(generation, _):
                    self.joined = set()
                    self.blamed.clear()
                    for rank in self.shuffled(self.workers):
                        if not self.workers[rank].dead:
                            self.workers[rank].leave()
                            self.seal_promised(rank)
                case m.Replace(rank):
                    self._held_of(rank, pid=0)  # what the dead one had asked for is done
                    self.nodes[rank // self.per_node].server.slow_s = 0.0
                    self.workers[rank] = self._worker(rank)
                    self.joined.discard(rank)
                case m.Begin(generation, decision):
                    self.reported = set()
                    self.copies = self.look()
                    self.possible = self.copies.possible(generation) & self.first_seen.possible(generation)
                    self._check_fresh(decision)
                    self._fence()
                    for worker in self.workers.values():
                        worker.generation = generation
                    self.last = command
                    self.say(f"begin g{generation} at {decision.step} {_kinds(decision)}")
                case m.Restore(_, decision):
                    self.reported = set()
                    self.last = command
                    assert self.membership.attempt < 100, "the same is tried again and again"
                    self._check_fresh(decision)
                    self._fence()
                    self.say(f"restore {decision.step} instead {_kinds(decision)}")
                case m.Go(step):
                    self._go(step)
                case m.AskDurable(exclude):
                    self._ask_durable(exclude)
                case m.Fail(code, message, _):
                    self._failed(code, message)
                case _:
                    raise AssertionError(command)
        if any(isinstance(command, m.Abort) for command in commands):
            self.first_seen = self.look()  # what arrives while ranks tell what they have, nobody need have heard of

    def _fence(self, **more: Any) -> None:
        """What every agent asks of its memory server."""
        for node in self.shuffled(self.nodes):
            self.nodes[node].agent.ask(r.Fence(generation=self.membership.generation, **more))

    def _held_of(self, rank: int, pid: int) -> list[dict[str, Any]]:
        node = self.nodes[rank // self.per_node]
        return list(node.agent.ask(r.Held(owner=rank, pid=pid)).snapshots)

    def _ask_durable(self, besides: Sequence[tuple[str, str]]) -> None:
        found = self.nodes[0].agent.ask(r.Durable(exclude=tuple(besides)))
        stored = [Offer.of_all(summary) for summary in found.checkpoints]
        problems = tuple(map(str, found.problems))
        self.say(f"durable: {[offer.save_id for offer in stored]} {problems}")
        unreachable = tuple(found.unreachable)
        self.carry_out(self.membership.durable_answered(stored, found.generation, problems, unreachable))

    def settle_membership(self) -> None:
        """Until everybody trains again."""
        while self.membership.phase is not m.JobPhase.RUNNING:
            if self.membership.phase is m.JobPhase.FORMING:
                if self.interrupt("forming"):
                    continue
                rank = self.rng.choice(sorted(set(self.workers) - self.joined))
                self._join(rank)
            else:
                if self.interrupt("restoring"):
                    continue
                assert self.last is not None
                rank = self.rng.choice(sorted(set(self.workers) - self.reported))
                self._restore(rank, self.last.decision)

    def _join(self, rank: int) -> None:
        worker = self.workers[rank]
        whole = worker.whole
        live = whole and Offer(
            "live", whole.step, rank, worker.node.number, whole.save_id, whole.own_digest, whole.sharing
        )
        node = rank // self.per_node
        held = [Offer.of_memory(summary, node) for summary in self._held_of(rank, pid=os.getpid())]
        self.joined.add(rank)
        self.carry_out(self.membership.join(rank, live, held))

    def _restore(self, rank: int, decision: Decision, error: str | None = None) -> None:
        addresses = {number: node.address for number, node in self.nodes.items()}
        generation, attempt = self.membership.generation, self.membership.attempt
        if self.store_fails and decision.source(rank).kind == "durable":
            self.store_fails, error = False, "a store that fails and comes back"
        if error is None:
            error = self.workers[rank].restore(decision, addresses, self.workers)
        else:
            self.blamed |= {(decision.step, generation_of(s.save_id)) for s in decision.sources[rank]}
        if error:
            self.say(f"rank {rank} cannot restore: {error}")
        self.reported.add(rank)
        self.carry_out(self.membership.restore_reported(rank, generation, attempt, error))

    # --- what is checked --------------------------------------------------------------------------

    def look(self) -> Copies:
        return Copies(self.run, self.runs, self.setting.kind, self.root, self.flipped).look(self.nodes, self.workers)

    def must(self) -> set[Commit]:
        """Commits that could be had when the generation began, and can be now."""
        return {c for c in self.possible & self.look().possible(self.membership.generation) if c not in self.blamed}

    def began(self) -> dict[int, int]:
        """What is known of where generations before this one began."""
        return {g: step for g, step in self.copies.starts().items() if g < self.membership.generation}

    def floor(self) -> set[Commit]:
        """Commits that have been promised to be there, whatever copies there are."""
        began = self.began()
        kept = self.promises.kept(self.setting.kind, self.run.world_size)
        if self.promises.protected is not None and not self.blamed:  # it, or something newer
            kept = kept | {self.promises.protected}
        return {c for c in kept if not given_up(c, began) and c not in self.blamed}

    def _check_fresh(self, decision: Decision) -> None:
        if not any(source.kind == "fresh" for sources in decision.sources.values() for source in sources):
            return
        assert all(s.kind == "fresh" for sources in decision.sources.values() for s in sources), "half of them fresh"
        commits = [commit for commit, moment in self.run.commits.items() if moment != START]
        made = sorted(commit for commit in commits if not given_up(commit, self.began()))
        assert not made, f"a fresh start, though this run has made {made[-3:]}"
        others = {c for c in self.possible if self.run.commits.get(c) != START}
        assert not others, f"a fresh start, though {max(others)} can be had"
        assert not self.copies.manifests, "a fresh start, though there are checkpoints in the store"

    def _failed(self, code: str, message: str) -> None:
        copies = self.look()
        self.copies = copies
        possible = {c for c in copies.possible(self.membership.generation) if c not in self.blamed}
        assert code == "NoCheckpointError", f"{code}: {message}"
        assert not possible, f"the job failed, though {max(possible)} can be had: {message}"
        floor = self.floor()
        assert not floor, f"the job failed, though {max(floor)} must be there: {message}"
        known = self.begun or bool(copies.manifests) or bool(self.blamed)
        assert known, f"the job failed where it should have started fresh: {message}"
        raise Ended(message)

    def _go(self, step: int) -> None:
        """Everybody has restored: what?"""
        assert self.last is not None
        decision, run = self.last.decision, self.run
        sources = [source for each in decision.sources.values() for source in each]
        must, floor, generation = self.must(), self.floor(), self.membership.generation
        if sources[0].kind == "fresh":
            origin, commit = START, (0, generation)
            assert step == 0
        else:
            commits = {(step, generation_of(source.save_id)) for source in sources}
            assert len(commits) == 1, f"a mix of {commits}"
            (commit,) = commits
            assert not given_up(commit, self.began()), f"{commit} was given up: {self.began()}"
            origin = self._check_state(commit, {source.kind for source in sources})
        newest = max((c[0] for c in must), default=0)
        assert step >= newest, f"step {step} was restored, though {max(must)} can be had"
        least = max((c[0] for c in floor), default=0)
        assert step >= least, f"step {step} was restored, though {max(floor)} must be there"
        stored = sorted({source.url for source in sources if source.kind == "durable"})
        self._fence(step=step, run=run.name, stored=stored)
        run.began[generation] = step
        self.promises.fence(generation, step)
        run.commits[step, generation] = origin
        self.step, self.begun = step, True
        self.say(f"go from {step} ({origin}); could have had {sorted(must)[-3:]}, must {sorted(floor)}")
        for rank in self.shuffled(self.workers):  # the loop begins by committing what was restored
            if self.interrupt_commit(rank, origin):
                return
            self.commit(rank, origin)

    def _check_state(self, commit: Commit, kinds: set[str]) -> Moment:
        """Every rank holds that commit, bit for bit; returns what it was made by."""
        candidates = [run for run in self.runs if commit in run.commits]
        if kinds != {"durable"}:
            candidates = [self.run]
        wrong = []
        for run in candidates:
            moment, resized = run.commits[commit], run.world_size != self.run.world_size
            of_first = resized and self.setting.kind.sharing == "alike"
            differences = [
                worker.objects.difference(moment, 0 if of_first else rank) for rank, worker in self.workers.items()
            ]
            if not any(differences):
                if of_first:  # from here on each has its own again
                    for worker in self.workers.values():
                        worker.objects.write(moment)
                return moment
            wrong += [difference for difference in differences if difference]
        raise AssertionError(f"what was restored as {commit} is no commit: {wrong[:3]}")


def _kinds(decision: Decision) -> dict[int, str]:
    return {rank: "+".join(f"{s.kind}{s.rank}" for s in each) for rank, each in decision.sources.items()}
