"""Random faults in small jobs: what is restored is bit for bit one committed step, the newest that the copies allow.

`HPX_SCHEDULE_SEED=17 pytest tests/faults/test_schedules.py` runs one schedule and prints what happened in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_place import Directory
from served import JOB, SECRET
from small_job import MEMORY, PEER, SmallJob, relaunched, replaced

from hyperpod_ext.errors import NoCheckpointError, NotFoundError
from hyperpod_ext.runtime.snapshot.manifest import generation_of
from hyperpod_ext.runtime.storage.names import parse_folder

ONE = os.environ.get("HPX_SCHEDULE_SEED")
several = pytest.mark.skipif(ONE is not None, reason="HPX_SCHEDULE_SEED asks for one schedule")
SHAPES = [(2, 1), (2, 1), (2, 2), (3, 1), (4, 1)]
"""Nodes, and ranks of each."""
Commit = tuple[int, int]
"""Step and generation."""


class Schedule:
    """One job, and the bytes that each copy of each commit must have."""

    def __init__(self, seed: int, make_job: Callable[..., SmallJob], folder: Path) -> None:
        self.rng, self.make_job, self.place = random.Random(seed), make_job, Directory(folder)
        rng, peers = self.rng, self.rng.choice([0, 1, 2, 3])
        tiers: list[dict[str, Any]] = [MEMORY]
        if peers:
            tiers.append({**PEER, "every_steps": peers, "max_slowdown": 1.0})
        if durable := rng.choice([0, 1, 2] if peers else [1, 2]):
            tiers.append(self.place.tier(every_steps=durable, keep=rng.choice([1, 2, 3])))
        nodes, workers = rng.choice(SHAPES)
        kind, overlap = rng.choice(["sharded", "sharded", "same"]), rng.random() < 0.5
        self.job = make_job(*tiers, nodes=nodes, workers=workers, kind=kind, policy={"overlap": overlap})
        self.story = [f"seed {seed}: {nodes} x {workers}, {kind}, {tiers}, overlap {overlap}"]
        self.step = self.committed = 0
        self.has_fault = False
        """Whether ranks have failed since the job last resumed. They make no other step."""
        self.protected = 0
        """A step that memory holds, whatever dies but a node."""
        self.images: dict[Commit, dict[int, bytes]] = defaultdict(dict)
        """In memory, by rank."""
        self.files: dict[str, bytes] = {}
        """In the durable tier."""
        self.world_sizes: dict[Commit, int] = {}
        self.began: dict[int, int] = {}
        """Step from which each generation went on."""

    def run(self) -> None:
        self.resume()
        for _ in range(self.rng.randint(2, 4)):
            self.train(self.rng.randint(0, 3))
            for _ in range(self.rng.choice([1, 1, 2])):
                fault = self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
                self.story.append(f"at {self.step}: {fault.__name__}")
                fault(self)
            if not self.resume():
                break
            self.has_fault = False
        else:
            self.train(1)
        self.job.stop()

    # --- what happens ---------------------------------------------------------------------------

    def train(self, steps: int) -> None:
        """A loop, which begins by committing what was restored."""
        if steps:
            self.step += steps
            self.job.train(self.step)
            self.keep()
            self.committed = max(self.committed, self.step)
            self.protected = self.step

    def resume(self) -> bool:
        """Whether the job goes on. It does from a commit that every rank could have, and from the newest one."""
        must = max((step for step, _ in self.possible()), default=None)
        try:
            step = self.job.resume(committed=self.committed)
        except NoCheckpointError as error:
            self.story.append(f"ends: {error}")
            if must is not None:
                raise
            return False
        self.story.append(f"generation {self.job.generation} goes on from {step}; could have had {must}")
        assert step >= (must or 0), f"step {step} was restored, though {must} can be had"
        assert step >= self.protected, f"step {step} was restored; no copy of {self.protected} was lost or damaged"
        assert step or must is not None or not self.manifests(), "a fresh start next to checkpoints"
        if step or must is not None:
            self.job.assert_holds(step)
        self.began[self.job.generation] = self.step = step
        return True

    # --- the copies -----------------------------------------------------------------------------

    def keep(self) -> None:
        """Remember the bytes of every new copy, while all of them are right."""
        for _, one, data in self.in_memory():
            commit = one["step"], generation_of(one["save_id"])
            self.world_sizes.setdefault(commit, self.job.world_size)
            self.images[commit].setdefault(one["rank"], data)
        for name, data in self.durable().items():
            self.files.setdefault(name, data)

    def durable(self) -> dict[str, bytes]:
        """Files in the durable tier; uploads and retention may rename and delete some meanwhile."""
        found = {}
        for name in self.place.names():
            with contextlib.suppress(FileNotFoundError):
                found[name] = self.place.read(name)
        return found

    def in_memory(self) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        for node, server in self.job.servers.items():
            for one in server.ask("held")["snapshots"]:
                try:
                    held = server.client().open(one["rank"], one["save_id"], secret=SECRET, job=JOB)
                except NotFoundError:  # a replica that gave way to a newer one meanwhile
                    continue
                yield node, one, bytes(held.image)

    def manifests(self) -> list[str]:
        return [name for name in self.place.names() if name.endswith("/manifest.json")]

    def possible(self) -> list[Commit]:
        """Commits that all ranks can have from copies whose bytes are right."""
        ranks: dict[Commit, set[int]] = defaultdict(set)
        for _, one, data in self.in_memory():
            commit = one["step"], generation_of(one["save_id"])
            if data == self.images[commit].get(one["rank"]):
                ranks[commit].add(one["rank"])
        whole = {name for name, data in self.durable().items() if data == self.files.get(name)}
        for name in whole.intersection(self.manifests()):
            folder, manifest = name.partition("/")[0], json.loads(self.files[name])
            plans = {known for known in self.files if known.startswith(f"{folder}/plan-")}
            if plans <= whole and (found := parse_folder(folder)):
                commit = found.step, found.generation
                self.world_sizes.setdefault(commit, manifest["world_size"])
                ranks[commit] |= {int(rank) for rank, file in manifest["files"].items() if f"{folder}/{file}" in whole}
        return [commit for commit, some in ranks.items() if self.is_enough(commit, some)]

    def is_enough(self, commit: Commit, ranks: set[int]) -> bool:
        step, generation = commit
        if any(later > generation and began < step for later, began in self.began.items()):
            return False
        wanted = range(self.world_sizes[commit])
        return bool(ranks) if self.job.kind == "same" else ranks >= {*wanted}


# --- faults ---------------------------------------------------------------------------------------


def lose(schedule: Schedule, nodes: list[int]) -> None:
    replaced(schedule.job, *nodes)
    schedule.has_fault, schedule.protected = True, 0
    schedule.story.append(f"lost nodes {nodes}")


def all_ranks_die(schedule: Schedule) -> None:
    """As each time before the job resumes."""


def some_ranks_save_a_step(schedule: Schedule) -> None:
    """All make it, and die before the others save."""
    job, step = schedule.job, schedule.step + 1
    if not job.ranks or schedule.has_fault:
        return
    schedule.has_fault = True
    saved = schedule.rng.sample(sorted(job.ranks), schedule.rng.randint(1, len(job.ranks)))
    for number, rank in job.ranks.items():
        if rank.run.step < step:
            rank.make_step(step)
            if number in saved:
                rank.commit(step)
                rank.checkpointer.flush()
    job.states[step] = job.whole_state()


def a_node_is_lost(schedule: Schedule) -> None:
    lose(schedule, [schedule.rng.choice(sorted(schedule.job.servers))])


def a_node_is_lost_while_it_copies(schedule: Schedule) -> None:
    some_ranks_save_a_step(schedule)
    a_node_is_lost(schedule)


def two_nodes_are_lost(schedule: Schedule) -> None:
    lose(schedule, schedule.rng.sample(sorted(schedule.job.servers), 2))


def all_nodes_are_lost(schedule: Schedule) -> None:
    lose(schedule, sorted(schedule.job.servers))


def the_job_is_started_again(schedule: Schedule) -> None:
    """By another number of nodes, maybe; only what is durable is left."""
    nodes, workers = schedule.rng.choice([(schedule.job.nodes, schedule.job.workers), *SHAPES])
    schedule.job = relaunched(schedule.make_job, schedule.job, nodes=nodes, workers=workers)
    schedule.committed = schedule.protected = 0
    schedule.story.append(f"{nodes} x {workers}")


def bits_flip_in_memory(schedule: Schedule) -> None:
    found = [held for held in schedule.in_memory() if len(held[2]) > 1]  # some ranks may have no shard at all
    schedule.protected = 0
    for node, one, _ in schedule.rng.sample(found, min(len(found), schedule.rng.randint(1, 3))):
        where = schedule.rng.choice(["first byte", "data", "last byte"])
        schedule.job.image(node, one["rank"], one["step"], replica=one["replica"]).flip(where)
        schedule.story.append(f"{where} of {one['save_id']} of rank {one['rank']} on node {node}")


def files_are_damaged(schedule: Schedule) -> None:
    place, rng = schedule.place, schedule.rng
    files = {name: data for name, data in schedule.durable().items() if name in schedule.files}
    names = [name for name in files if name.startswith("step-")]
    for name in rng.sample(names, min(len(names), rng.randint(1, 3))):
        data, how = bytearray(files[name]), rng.choice(["flip", "cut", "remove"])
        schedule.story.append(f"{how} {name}")
        if how == "remove" or not data:
            place.delete(name)
            continue
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        place.write(name, bytes(data if how == "flip" else data[:at]))


FAULTS: dict[Callable[[Schedule], None], int] = {
    all_ranks_die: 2,
    some_ranks_save_a_step: 4,
    a_node_is_lost: 4,
    a_node_is_lost_while_it_copies: 3,
    two_nodes_are_lost: 1,
    all_nodes_are_lost: 1,
    the_job_is_started_again: 3,
    bits_flip_in_memory: 5,
    files_are_damaged: 4,
}


def check(make_job: Callable[..., SmallJob], folder: Path, seeds: range) -> None:
    for seed in seeds:
        schedule = Schedule(seed, make_job, folder / f"durable{seed}")
        try:
            schedule.run()
        except BaseException as error:
            error.add_note("\n".join([f"HPX_SCHEDULE_SEED={seed}", *schedule.story]))
            raise


@pytest.mark.skipif(ONE is None, reason="HPX_SCHEDULE_SEED says which")
def test_the_schedule_that_was_asked_for(make_job: Any, tmp_path: Path) -> None:
    schedule = Schedule(int(str(ONE)), make_job, tmp_path / "durable")
    try:
        schedule.run()
    finally:
        print("\n".join(schedule.story))


@several
@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.thorough), 6])
def test_schedules_of_faults_end_with_one_committed_step(first: int, make_job: Any, tmp_path: Path) -> None:
    check(make_job, tmp_path, range(first, first + 6))


@several
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)  # seven seconds a schedule on a busy machine
def test_a_hundred_more_schedules(make_job: Any, tmp_path: Path) -> None:
    check(make_job, tmp_path, range(1_000, 1_100))


@several
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thousands_of_schedules(make_job: Any, tmp_path: Path) -> None:
    check(make_job, tmp_path, range(10_000, 13_000))
