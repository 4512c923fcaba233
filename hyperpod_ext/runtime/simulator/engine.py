"""Simulates one job: draws faults at random, lets the code of real jobs decide, and continues training from the
decision."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hyperpod_ext.planner.costs import group_size
from hyperpod_ext.runtime.simulator.interval import FaultFreeInterval
from hyperpod_ext.runtime.simulator.job_model import JobModel, Known, where_from
from hyperpod_ext.runtime.simulator.memory import BLOCK, Memory
from hyperpod_ext.runtime.simulator.settings import Simulated

Class = Literal["process", "node", "correlated"]


@dataclass
class Outcome:
    """The result of one simulated job. Times are in seconds."""

    wall_s: float = 0.0
    steps: int = 0
    """Number of steps that the job has when it ends, without repetitions."""
    kept_s: float = 0.0
    saving_s: float = 0.0
    """Time that snapshots took in steps that count."""
    recovery_s: float = 0.0
    """Time from faults until training continued."""
    lost_steps: int = 0
    """Number of complete steps that had to be repeated."""
    faults: dict[str, int] = field(default_factory=lambda: {"process": 0, "node": 0, "correlated": 0})
    sources: dict[str, int] = field(default_factory=dict)
    """Number of ranks that restored from each kind of source, over all recoveries."""
    fell_back_to: dict[str, int] = field(default_factory=dict)
    """Number of recoveries, by the slowest source from which a rank had to restore."""
    relaunches: int = 0
    """Number of times that the job failed and was started again."""
    given_up: list[str] = field(default_factory=list)
    """Causes of the first few failures of the job."""
    traffic: dict[str, float] = field(default_factory=dict)
    """Number of bytes that were sent to peers, written to storage, and read to restore."""

    @property
    def goodput(self) -> float:
        return self.kept_s / self.wall_s if self.wall_s else 0.0

    @property
    def lost_s(self) -> float:
        """Time of lost work in seconds, including the snapshots in it."""
        return self.wall_s - self.kept_s - self.saving_s - self.recovery_s

    def to_json(self) -> dict[str, Any]:
        return {
            "goodput": round(self.goodput, 6),
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "seconds": {
                "wall": round(self.wall_s, 1),
                "kept": round(self.kept_s, 1),
                "saving": round(self.saving_s, 1),
                "recovery": round(self.recovery_s, 1),
                "lost_work": round(self.lost_s, 1),
            },
            "faults": self.faults,
            "fell_back_to": dict(sorted(self.fell_back_to.items())),
            "sources": dict(sorted(self.sources.items())),
            "relaunches": self.relaunches,
            "given_up": self.given_up,
            "traffic_gb": {name: round(nbytes / 1e9, 3) for name, nbytes in sorted(self.traffic.items())},
        }


_FAR = ("self", "live", "memory", "disk", "peer", "parity", "s3", "fresh")
_WHYS = 3


class Simulation:
    """Simulates one job from its start until `days` have passed. The same seed gives the same result.

    Args:
        every_rank: whether to simulate every rank in every decision, which is slow and leads to the same decisions.
    """

    def __init__(self, settings: Simulated, seed: int, *, every_rank: bool = False) -> None:
        self._settings, self._random, self._every_rank = settings, random.Random(seed), every_rank
        nodes = {rank: rank for rank in range(settings.nodes)}
        self._known = Known(nodes, set(range(settings.nodes, settings.nodes + settings.spares)))
        self._rank_on = {node: rank for rank, node in nodes.items()}
        self._known_committed = 0
        self._upcoming = 0.0
        self._memory = Memory(settings, settings.nodes if every_rank else BLOCK)
        self._memory.place(nodes, 0.0)
        self._down: list[tuple[float, int]] = []
        """Time in seconds at which each lost node is available again, and the node's number."""
        rates = settings.rates.of_job(settings.nodes)
        self._weights = {"process": rates.process, "node": rates.node, "correlated": rates.correlated}
        self._rate = rates.total
        self.outcome = Outcome()
        self._interval = self._train(0.0, 0)

    def run(self, days: float) -> Outcome:
        """Simulate the job for this many days, and return its outcome."""
        end = days * 86400.0
        fault = self._next_fault(0.0)
        while fault < end:
            resumed = self._recover(fault)
            if resumed >= end:
                self.outcome.recovery_s -= resumed - end
                self._finish(end, self._interval.step)
                return self.outcome
            fault = self._upcoming
        self._end_interval(end)
        self.outcome.saving_s += self._interval.blocked(self._known.committed)
        self._finish(end, self._known.committed)
        return self.outcome

    def _finish(self, end: float, step: int) -> None:
        self.outcome.wall_s, self.outcome.steps = end, step
        self.outcome.kept_s = step * self._settings.step_s

    def _next_fault(self, moment: float) -> float:
        return moment + self._random.expovariate(self._rate) if self._rate > 0 else float("inf")

    def _train(self, moment: float, step: int) -> FaultFreeInterval:
        settings = self._settings
        return FaultFreeInterval(moment, step, self._known.generation, settings.step_s, settings.tiers)

    def _end_interval(self, moment: float) -> None:
        """End the present interval of training at the time `moment`: a fault or the end of the simulation."""
        interval = self._interval
        self._known.committed = self._known_committed = interval.newest(moment)
        self._memory.train(interval, moment)
        settings, traffic = self._settings, self.outcome.traffic
        if "peer" in settings.tiers:
            each = settings.node_bytes * settings.replicas * settings.nodes
            traffic["to_peers"] = traffic.get("to_peers", 0.0) + interval.captured("peer", moment) * each
        if "durable" in settings.tiers:
            written = interval.captured("durable", moment) * settings.state_bytes
            traffic["to_storage"] = traffic.get("to_storage", 0.0) + written

    # --- one recovery -----------------------------------------------------------------------------

    def _recover(self, moment: float) -> float:
        """Simulate the recovery from a fault at time `moment`, including faults during the recovery.

        Returns the time at which training continues."""
        self._end_interval(moment)
        faults = [self._draw_fault(moment)]
        upcoming = self._next_fault(moment)
        while True:
            recovery = self._simulate_recovery(faults)
            if recovery.job.failed is not None or upcoming >= recovery.ready:
                break
            faults.append(self._draw_fault(upcoming))
            upcoming = self._next_fault(upcoming)
        self._upcoming = upcoming
        self._down = recovery.down
        for fault in faults:
            self.outcome.faults[fault.kind] += 1
        decision = None if recovery.job.failed is not None else recovery.job.decide(moment)
        if decision is None:
            assert recovery.job.failed is not None
            why = recovery.job.failed.message.partition(" Seen:")[0]
            some, everybody = (
                f"all {count} ranks" for count in (len(recovery.job.membership.nodes), self._settings.nodes)
            )
            return self._relaunch(why.replace(some, everybody), moment, recovery.ready)
        ranks = recovery.job.membership.nodes
        counts = where_from(decision, ranks)
        if len(ranks) < self._settings.nodes:
            kind = decision.sources[recovery.witness][0].name
            counts[kind] = counts.get(kind, 0) + self._settings.nodes - len(ranks)
        self._memory.give_up(decision.step)
        resumed = self._resume(decision.step, counts, moment, recovery.ready)
        if moved := recovery.job.moved:
            for node in moved.values():
                self._rank_on.pop(node, None)
            self._rank_on |= {self._known.nodes[rank]: rank for rank in moved}
            self._memory.moved(self._known.nodes, moved, resumed)
        return resumed

    def _draw_fault(self, moment: float) -> _SimulatedFault:
        """Draw a fault at random: its kind, its rank, and the time that the repair of its node takes."""
        kinds: list[Class] = ["process", "node", "correlated"]
        (kind,) = self._random.choices(kinds, [self._weights[kind] for kind in kinds])
        rank = self._random.randrange(self._settings.nodes)
        repair = self._random.expovariate(1 / self._settings.repair_s)
        return _SimulatedFault(moment, kind, rank, repair)

    def _ranks_hit(self, fault: _SimulatedFault) -> tuple[int, ...]:
        """Return the ranks on the nodes that a fault hits, as they were before the recovery's first fault."""
        nodes, size = self._known.nodes, self._settings.rack_nodes
        if fault.kind != "correlated":
            return (fault.rank,)
        first = nodes[fault.rank] // size * size
        return tuple(self._rank_on[node] for node in range(first, first + size) if node in self._rank_on)

    def _simulate_recovery(self, faults: Sequence[_SimulatedFault]) -> _SimulatedRecovery:
        """Apply the faults to the membership, until all ranks can join."""
        settings, touched = self._settings, {rank for fault in faults for rank in self._ranks_hit(fault)}
        ranks, witness = self._ranks_of(touched)
        job = JobModel(settings, self._known, self._memory, ranks, self._known.committed)
        down, ready = sorted(self._down), 0.0
        for fault in faults:
            while down and down[0][0] <= fault.moment:
                job.node_came(heapq.heappop(down)[1])
            ready = max(ready, fault.moment + self._take(fault, job, down))
            if job.failed is not None:
                break
        while job.waiting and job.failed is None:
            waited = down[0][0] - faults[-1].moment if down else settings.node_wait_s
            if not down or waited > settings.node_wait_s:
                job.nobody_came(settings.node_wait_s)
                ready = max(ready, faults[-1].moment + settings.node_wait_s)
                break
            came, node = heapq.heappop(down)
            job.node_came(node)
            ready = max(ready, came + settings.recovery.node)
        return _SimulatedRecovery(job, ready, down, witness)

    def _take(self, fault: _SimulatedFault, job: JobModel, down: list[tuple[float, int]]) -> float:
        """Apply one fault to the job. Returns the time in seconds that the recovery from this fault takes."""
        for rank in self._ranks_hit(fault):
            if job.failed is not None or rank in job.membership.unassigned:
                continue
            if fault.kind == "process":
                job.process_died(rank, fault.moment)
                continue
            node = job.membership.nodes[rank]
            job.node_lost(node, fault.moment)
            heapq.heappush(down, (fault.moment + fault.repair, node))
        recovery = self._settings.recovery
        return recovery.process if fault.kind == "process" else recovery.node

    def _ranks_of(self, touched: set[int]) -> tuple[list[int], int]:
        """Return the ranks to simulate, and one rank that represents all ranks that are not affected.

        The ranks to simulate are affected or have recently moved, or their nodes hold copies for such ranks."""
        nodes = self._known.nodes
        if self._every_rank:
            return list(nodes), 0
        differ = touched | {self._rank_on[node] for node in self._memory.joining() if node in self._rank_on}
        holders = {holder for rank in differ for holder in self._memory.holders(nodes[rank], rank)}
        involved = differ | {self._rank_on[node] for node in holders if node in self._rank_on}
        witness = next((rank for rank in nodes if rank not in involved), 0)
        return sorted(involved | {witness}), witness

    def _resume(self, step: int, counts: dict[str, int], moment: float, ready: float) -> float:
        """Continue after `step`, which all ranks have restored. Returns the time at which training continues."""
        settings, outcome = self._settings, self.outcome
        before, committed = self._interval, self._known_committed
        far = max(counts, key=_FAR.index)
        outcome.fell_back_to[far] = outcome.fell_back_to.get(far, 0) + 1
        for kind, count in counts.items():
            outcome.sources[kind] = outcome.sources.get(kind, 0) + count
        read = sum(count for kind, count in counts.items() if kind in ("live", "peer", "s3"))
        if settings.parity is not None:  # a rebuild reads a snapshot from each other node of its parity group
            read += counts.get("parity", 0) * (group_size(settings.nodes, settings.parity) - 1)
        outcome.traffic["to_restore"] = outcome.traffic.get("to_restore", 0.0) + read * settings.node_bytes
        outcome.lost_steps += committed - step
        outcome.saving_s += before.blocked(max(before.step, min(step, committed)))
        resumed = ready + self._read_s(far)
        outcome.recovery_s += resumed - max(moment, before.start)
        self._interval = self._train(resumed, step)
        return resumed

    def _read_s(self, kind: str) -> float:
        tier = self._settings.tiers.get({"s3": "durable", "parity": "peer"}.get(kind, kind))
        return tier.read if tier is not None else self._settings.live_read_s if kind == "live" else 0.0

    def _relaunch(self, why: str, moment: float, ready: float) -> float:
        """Start the failed job again on the nodes that are available, from its newest durable checkpoint."""
        settings, known, outcome = self._settings, self._known, self.outcome
        outcome.relaunches += 1
        if len(outcome.given_up) < _WHYS:
            outcome.given_up.append(why)
        out = {node for _, node in self._down}
        there = [node for node in range(settings.nodes + settings.spares) if node not in out]
        while len(there) < settings.nodes:
            came, node = heapq.heappop(self._down)
            ready = max(ready, came)
            there.append(node)
        there.sort()
        nodes = dict(enumerate(there[: settings.nodes]))
        self._known = Known(nodes, set(there[settings.nodes :]), generation=known.generation + 1)
        self._rank_on = {node: rank for rank, node in nodes.items()}
        self._memory.place(nodes, ready)
        job = JobModel(settings, self._known, self._memory, list(nodes) if self._every_rank else [0], None)
        decision = job.decide(ready)
        assert decision is not None, job.failed
        kind = decision.sources[0][0].name
        return self._resume(decision.step, {kind: settings.nodes}, moment, ready + settings.recovery.job)


@dataclass(frozen=True, slots=True)
class _SimulatedFault:
    """A fault that was drawn at random: its time, kind and rank, and the duration of the repair."""

    moment: float
    kind: Class
    rank: int
    repair: float


@dataclass(frozen=True, slots=True)
class _SimulatedRecovery:
    """A recovery, up to the time when all ranks can join."""

    job: JobModel
    ready: float
    down: list[tuple[float, int]]
    witness: int
