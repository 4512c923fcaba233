"""One simulated cluster: its machines, its network, its time, what goes wrong in it, and the story of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.scratch import scratch_folder

from .event_loop import SimulatedLoop, StandstillError, simulated_time
from .faults import Fault, Setting, draw, setting_of
from .judge import Judge
from .machine import Machine, simulated_machines
from .network import Network
from .passing import messages_passed
from .worker import Collectives, Worker

LEASE_S = 6.0
SHARED_MEMORY = Path("/dev/shm")
_FAULTS = 5
BOUND_S = 150.0
"""After the last fault: in which the job ends, one way or another."""


class Cluster:
    """Everything in it follows from the seed.

    Args:
        tells: whether its story is written down. It is much work, and only needed where something is violated.
        passes: whether messages are handed over as objects.
    """

    def __init__(self, setting: Setting, rng: random.Random, folder: Path, *, tells: bool, passes: bool) -> None:
        self.setting, self.rng, self.folder, self.tells = setting, rng, folder, tells
        self.loop = SimulatedLoop()
        self.network = Network(self.loop, rng, (0.0002, 0.003), passes=passes)
        self.sharing, self.steps, self.step_s, self.spread_s = setting.sharing, setting.steps, setting.step_s, 0.01
        self.config = RuntimeConfig(
            name="simulated",
            nodes=setting.nodes,
            workers_per_node=setting.workers_per_node,
            spares=setting.spares,
            restart=RestartPolicy(
                policy="continue" if setting.continues else "wait",
                lease_s=LEASE_S,
                node_wait_s=15.0,
                form_timeout_s=30.0,
                leave_timeout_s=5.0,
            ),
            checkpoint=CheckpointPolicy(tiers=(MemoryTier(), PeerTier(every_steps=1))),
        )
        self.story: list[str] = []
        self.violations: list[str] = []
        self.is_over = False
        """What code does that is torn down is none of the story."""
        self.judge = Judge(self)
        self.collectives = Collectives(self)
        self.machines = [
            Machine(self, node, rng.choice([0.0, rng.uniform(0, 1e5)]))
            for node in range(setting.nodes + setting.spares)
        ]
        self._pids = 100

    def tell(self, what: str) -> None:
        """A line of the story."""
        if self.tells and not self.is_over:
            self.story.append(f"{self.loop.time():8.3f}  {what}")

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def worker_of(self, rank: int) -> Worker | None:
        """Who has a rank in the newest generation that it is in."""
        found = [w for machine in self.machines for w in machine.workers.values() if w.rank == rank and w.alive]
        return max(found, key=lambda worker: worker.generation, default=None)

    @property
    def agents(self) -> list[Machine]:
        """Machines whose agent runs."""
        return [machine for machine in self.machines if machine.agent is not None]

    def run(self, faults: list[Fault]) -> None:
        """From the start of all agents to the end of the last one; faults come at their times."""
        loop = self.loop
        with contextlib.ExitStack() as stack:
            stack.enter_context(simulated_time(loop))
            stack.enter_context(simulated_machines(self.setting.candidates))
            stack.enter_context(contextlib.redirect_stderr(_Story(self)))
            if self.network.passes:
                stack.enter_context(messages_passed())
            for machine in self.machines:
                loop.call_later(self.rng.uniform(0, 0.5), machine.boot)
            for fault in faults:
                loop.call_at(fault.at, fault.happen, self)
            last = max((fault.until for fault in faults), default=0.0)
            loop.set_exception_handler(self._unhandled)
            main = loop.create_task(self._watch(last + self.setting.steps * self.step_s + BOUND_S))
            try:
                loop.run_until_complete(main)
            except StandstillError:
                self.judge.violated("nothing happens any more, and the job has not ended")
            self.judge.at_end()
            self.is_over = True
            loop.end()

    async def _watch(self, until: float) -> None:
        await asyncio.sleep(1.0)
        while self.agents and not self.violations:
            if self.loop.time() > until:
                self.judge.violated(f"the job has not ended {BOUND_S:g} s after the last fault")
            await asyncio.sleep(1.0)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, ConnectionError):
            self.judge.violated(f"an exception that nobody takes: {error!r} ({context.get('message')})")


class _Story(io.StringIO):
    """What is said on stderr is part of the story."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def write(self, text: str) -> int:
        if text.strip():
            self._cluster.tell(f"  stderr: {text.strip()}")
        return len(text)


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    setting: Setting
    violations: list[str]
    states: list[str]
    story: list[str]
    seconds: float
    """Simulated."""


_ENCODED = 16
"""One seed of so many has its messages encoded, read and checked as on a real wire."""
_LARGE = 5
"""In one seed of so many, not every node has what another coordinator needs, as in jobs of more than 17 nodes."""
_COLLECTED = 10
"""After so many seeds garbage is collected."""


def run_seed(
    seed: int, *, tells: bool = False, passes: bool | None = None, continues: bool = False, nodes: int | None = None
) -> Outcome:
    """One schedule. The same seed gives the same story, which is told where it is asked for, or something is violated.

    Args:
        passes: whether messages are handed over as objects; None: of most seeds.
        continues: in a job that goes on without lost ranks.
        nodes: of one worker each, where the seed is not to say how many.
    """

    def run(tells: bool) -> Outcome:
        rng = random.Random(seed)
        setting = setting_of(rng)
        if continues:
            setting = replace(setting, continues=True, sharing="same")
        if seed % _LARGE == 0:
            setting = replace(setting, candidates=2)
        if nodes is not None:
            setting = replace(setting, nodes=nodes, workers_per_node=1)
        as_objects = seed % _ENCODED != 0 if passes is None else passes
        return _run(seed, rng, setting, lambda: draw(rng, setting, _FAULTS), tells=tells, passes=as_objects)

    outcome = run(tells)
    return run(True) if outcome.violations and not tells else outcome


def run_faults(setting: Setting, *faults: Fault) -> Outcome:
    """These faults, in a cluster of this kind."""
    return _run(0, random.Random(0), setting, lambda: list(faults), tells=True, passes=False)


def _run(
    seed: int, rng: random.Random, setting: Setting, plan: Callable[[], list[Fault]], *, tells: bool, passes: bool
) -> Outcome:
    with scratch_folder("simulated-", SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        cluster = Cluster(setting, rng, folder, tells=tells, passes=passes)
        cluster.tell(f"seed {seed}: {setting}")
        cluster.run(plan())
        return Outcome(seed, setting, cluster.violations, cluster.judge.states, cluster.story, cluster.loop.time())


def run_seeds(first: int, last: int, *, continues: bool = False, nodes: int | None = None) -> Iterator[Outcome]:
    """One after the other. Garbage, of which a cluster leaves little before its end, is looked for seldom."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    gc.collect()
    gc.freeze()  # for good: of a test run, all that was collected is frozen already
    try:
        for seed in range(first, last):
            yield run_seed(seed, continues=continues, nodes=nodes)
            if seed % _COLLECTED == 0:
                gc.collect()
    finally:
        gc.set_threshold(*before)
