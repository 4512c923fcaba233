"""What must hold whatever happens, judged by what truly happened: no decision is shared with the code it judges."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyperpod_ext.runtime.events.event import Other
from hyperpod_ext.runtime.events.log import REPORT
from hyperpod_ext.runtime.ipc import control_messages as c

from .memory import Copy

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Worker

_SETTLED_S = 0.25
"""A copy counts that was there so long before it was asked for; younger ones may have come too late."""


_SAME_DEATH = 3
"""Deaths of one rank that may end a job, as they may be its script's own."""


@dataclass
class Judge:
    """Sees every order that an agent follows, every line of the event log, and everything that workers do."""

    cluster: Cluster
    coordinators: dict[int, int] = field(default_factory=dict)
    """Of each term: the node that coordinates."""
    parents: dict[int, int] = field(default_factory=dict)
    """Of each history: the one that it goes on."""
    steps_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    head: int = 0
    """The history that the job has come to: of the newest step that all ranks of a generation have made."""
    head_generation: int = 0
    members: dict[tuple[int, int], Worker] = field(default_factory=dict)
    """Who has each rank of each generation."""
    decisions: dict[int, int] = field(default_factory=dict)
    went_on: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step and history of each generation."""
    states: list[str] = field(default_factory=list)
    """How the job ended, by each coordinator that has ended it."""
    has_ended: bool = False
    """Whether a coordinator has ended the job."""
    best_at_end: int = 0
    """Newest step that all ranks could have had when the job ended."""
    given_up: set[int] = field(default_factory=set)
    """Nodes that the job goes on without."""
    unreadable: bool = False
    """Whether some node's copies could not be read for a while."""
    disturbed: set[int] = field(default_factory=set)
    """Nodes that something has happened to, other than to their workers."""
    silent: bool = False
    """Whether a node has fallen silent."""
    struck: dict[int, int] = field(default_factory=dict)
    """How often the worker of each rank was killed, or raised."""

    def violated(self, what: str) -> None:
        self.cluster.tell(f"VIOLATED: {what}")
        if not self.cluster.is_over:
            self.cluster.violations.append(what)

    # --- who coordinates ------------------------------------------------------------------------

    def ordered(self, node: int, order: c.ToAgent) -> None:
        """An agent is about to follow an order."""
        if isinstance(order, c.JobNews):
            self._coordinates(order.term, order.coordinator)
        elif isinstance(order, c.BeginGeneration):
            step = order.decision.step
            if (known := self.decisions.setdefault(order.generation, step)) != step:
                self.violated(f"generation {order.generation} begins twice, from steps {known} and {step}")

    def _coordinates(self, term: int, node: int) -> None:
        if (other := self.coordinators.setdefault(term, node)) != node:
            self.violated(f"nodes {other} and {node} both coordinate in term {term}")

    def logged(self, node: int, coordinator: Any, event: Any) -> None:
        """A coordinator has written a line of the event log."""
        name = event.name if isinstance(event, Other) else event.event
        if self.cluster.tells and name not in ("step", "begun", "joined", "worker_started", "imported", "done"):
            said = event.model_dump(exclude_defaults=True, exclude={"t", "event", "type", "pid"})
            self.cluster.tell(f"  log of node {node}: {name} {said}")
        if isinstance(event, Other) and event.why:
            self.violated(f"an event is not as declared: {event}")
        if self.cluster.is_over:
            return
        if name == "node_joined":
            self.given_up.discard(event.node)
        elif name == "node_lost":
            self.given_up.add(event.node)
        if name == "job_ended":
            if self.states and event.state not in self.states:
                self.violated(f"the job has ended as {self.states[-1]}, and ends again as {event.state}")
            self.states.append(event.state)
            self.has_ended = True
            self.best_at_end = self._best()
        elif name == "go" and self.has_ended:
            self.violated(f"node {node} has ranks go on after the job has ended: {self.states}")
        elif name == "fault" and event.kind == "late":
            self.violated(f"rank {event.rank} was not ready in time, and nothing lasts so long here")
        elif name == "node_lost" and not self.disturbed & {node, event.node} and not self.states:
            self.violated(f"node {event.node} is given up, and nothing has happened to it: {event.cause}")

    # --- what is restored -----------------------------------------------------------------------

    def begins(self, worker: Worker, order: c.BeginGeneration) -> None:
        """A worker has been told what its generation restores."""
        key = order.generation, worker.rank
        other = self.members.setdefault(key, worker)
        if other is not worker:
            self.violated(f"{other} and {worker} both have rank {worker.rank} of generation {order.generation}")
        if worker.rank == 0:
            self._judge_decision(order)

    def _judge_decision(self, order: c.BeginGeneration) -> None:
        step, best = order.decision.step, self._best()
        self.cluster.tell(f"generation {order.generation} begins from step {step}")
        if step < best:
            self.violated(f"generation {order.generation} restores step {step}; all ranks can have step {best}")

    def _best(self) -> int:
        """Newest step that all ranks can have from what was there when they joined."""
        copies, ranks = self._offered(), set(range(self.cluster.config.world_size))
        had: dict[int, set[int]] = {}
        for copy in copies:
            had.setdefault(copy.history, set()).add(copy.rank)
        whole = [
            history
            for history, its in had.items()
            if self._goes_on(history) and (self.cluster.sharing == "same" or its >= ranks)
        ]
        return max((self.steps_of[history] for history in whole), default=0)

    def _offered(self) -> list[Copy]:
        """What was there for all to see when the last ranks joined."""
        cluster = self.cluster
        copies = []
        for machine in cluster.machines:
            joined = [worker for worker in machine.workers.values() if worker.generation or worker.is_waiting]
            if machine.memory is None or not joined or machine.node in self.given_up:
                continue
            still = set(machine.memory.copies)
            until = cluster.loop.time() - _SETTLED_S
            copies += [copy for copy in machine.memory.answered if copy.kept_at < until and copy in still]
        return copies

    def _goes_on(self, history: int) -> bool:
        """Whether it is what the job has come to, or goes on from there."""
        while self.steps_of[history] > self.steps_of[self.head]:
            history = self.parents[history]
        return history == self.head or history in self._ancestors()

    def _ancestors(self) -> set[int]:
        found, history = {0}, self.head
        while history:
            found.add(history)
            history = self.parents[history]
        return found

    def goes_on(self, worker: Worker, step: int) -> None:
        """A worker trains from here."""
        state, generation = worker.state, worker.generation
        if state is None or state.step != step:
            self.violated(f"{worker} goes on from step {step}, and has {state}")
            return
        ranks = worker.world_size
        ready = [one for rank in range(ranks) if (one := self.members.get((generation, rank))) and one.has_restored]
        if generation not in self.went_on and len(ready) < ranks:
            self.violated(f"generation {generation} goes on, and only {len(ready)} of {ranks} ranks have restored")
        known = self.went_on.setdefault(generation, (step, state.history))
        if known != (step, state.history):
            self.violated(f"ranks of generation {generation} go on from different states: {known} and {state}")

    # --- training -------------------------------------------------------------------------------

    def steps(self, workers: list[Worker], step: int) -> int:
        """All ranks of a generation make a step together; returns its history."""
        generation = workers[0].generation
        before = {worker.state.history for worker in workers if worker.state}
        if len(before) != 1:
            self.violated(f"ranks of generation {generation} make step {step} from different states")
        if generation < self.head_generation:
            self.violated(f"generation {generation} makes step {step} after generation {self.head_generation} has")
        history = len(self.steps_of)
        self.parents[history], self.steps_of[history] = min(before), step
        self.head, self.head_generation = min(before), generation
        return history

    # --- the end --------------------------------------------------------------------------------

    def _can_spare_one(self) -> bool:
        """Whether there are nodes enough, and each rank's state is on more than one."""
        setting = self.cluster.setting
        return setting.spares > 0 and setting.nodes + setting.spares >= 3 and setting.sharing == "same"

    def at_end(self) -> None:
        """The job is over."""
        cluster, nothing_left, was_done = self.cluster, False, False
        if (report := cluster.folder / REPORT).exists():
            error = json.loads(report.read_text()).get("error") or {}
            if error.get("code") == "HyperpodExtError":  # an error of ours
                self.violated(f"the job ends with {error['message']}")
            nothing_left = error.get("code") == "NoCheckpointError"
            if nothing_left and not self.unreadable and self.best_at_end:
                self.violated(f"the job ends without a step, and all ranks can have step {self.best_at_end}")
            # all was made; that a rank dies on its way out is told as it is
            was_done = bool(self.struck) and str(error.get("message")).endswith("after its training was done")
            if error:
                cluster.tell(f"last word: {error['code']}: {error['message']}")
        can_go_on = not (nothing_left or was_done) and max(self.struck.values(), default=0) < _SAME_DEATH
        can_go_on &= not self.disturbed or (len(self.disturbed) == 1 and self._can_spare_one())
        if can_go_on and "succeeded" not in self.states:
            self.violated(f"the job had what it needs, and ends: {self.states or 'nobody says how'}")
        if "succeeded" in self.states and self.steps_of[max(self.steps_of)] != cluster.steps:
            self.violated("the job has succeeded before its last step")
