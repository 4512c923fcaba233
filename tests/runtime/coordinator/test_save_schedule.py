"""Which steps go to tiers that go by time, and what it costs to find that out: every step of every rank asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kept_orders import handshake_of

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator import save_schedule
from hyperpod_ext.runtime.coordinator.interval_tuner import START_PEER_S
from hyperpod_ext.runtime.coordinator.job_run import Ranks
from hyperpod_ext.runtime.coordinator.members import Agent, Members
from hyperpod_ext.runtime.coordinator.save_schedule import SaveSchedule
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership

RANKS = 64
EVENTS = 500
CALLS: Counter[str] = Counter()


class Counted(dict[int, int]):
    """Counts how often somebody goes through it."""

    def values(self) -> Any:
        CALLS["gone through"] += 1
        return super().values()

    def __iter__(self) -> Iterator[int]:
        CALLS["gone through"] += 1
        return super().__iter__()


def schedule_of(*, nodes: int = 8, took_s: float | None = 1.0) -> tuple[SaveSchedule, Ranks, Membership]:
    """Of a job whose copies on peers are tuned, and whose durable tier is not due. `took_s`: a step."""
    tiers = (MemoryTier(), PeerTier(every_steps="auto"), FileTier(path="/none", every_seconds=1e6))  # type: ignore[arg-type]
    config = RuntimeConfig(
        name="a", nodes=nodes, workers_per_node=RANKS // nodes, checkpoint=CheckpointPolicy(tiers=tiers)
    )
    schedule, ranks = SaveSchedule(config, lambda *_, **__: None, 0.0), Ranks(steps=Counted())
    membership = Membership({rank: rank * nodes // RANKS for rank in range(RANKS)}, Budgets(1))
    membership.nodes = Counted(membership.nodes)
    for step in range(3 if took_s is not None else 0):
        schedule.heard({"event": "step", "rank": 0, "step": step, "began": 0.0, "t": took_s}, 0.0)
    return schedule, ranks, membership


@pytest.mark.parametrize(
    "why", ["replicated", "one node", "steps are not timed yet", "the named step is still to come"]
)
def test_asking_for_what_is_not_to_be_named_costs_nothing_that_grows(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, took_s = 1 if why == "one node" else 8, None if why == "steps are not timed yet" else 1.0
    schedule, ranks, membership = schedule_of(nodes=nodes, took_s=took_s)
    schedule.replicated = why == "replicated"
    ranks.committed(0, 10)
    if why == "the named step is still to come":
        assert schedule.due(ranks, membership, START_PEER_S) == [("peer", schedule.peer_step)]
    steps_ahead = schedule.tuner.steps_ahead
    monkeypatch.setattr(schedule.tuner, "steps_ahead", lambda: (CALLS.update(["sorted"]), steps_ahead())[1])
    CALLS.clear()
    for event in range(EVENTS):
        ranks.committed(event % RANKS, 10)
        assert schedule.due(ranks, membership, 2 * START_PEER_S + event / 1e4) == []
    assert CALLS["gone through"] <= 1
    assert CALLS["sorted"] <= 1


def test_a_step_is_named_soon_after_the_one_before_has_been_reached() -> None:
    schedule, ranks, membership = schedule_of()
    ranks.committed(0, 10)
    ((_, first),) = schedule.due(ranks, membership, START_PEER_S)
    assert schedule.due(ranks, membership, 2 * START_PEER_S) == []
    ranks.committed(5, first)
    assert schedule.due(ranks, membership, 2 * START_PEER_S + START_PEER_S * save_schedule.LOOK_AGAIN) != []


def test_what_is_looked_at_later_is_looked_at_when_another_generation_begins() -> None:
    """In which not every rank may hold the same state."""
    schedule, ranks, membership = schedule_of()
    schedule.replicated = True
    assert schedule.due(ranks, membership, START_PEER_S) == []
    schedule.begins(START_PEER_S)
    schedule.replicated = False
    assert schedule.due(ranks, membership, START_PEER_S) != []


def test_members_that_come_before_the_job_begins_are_kept_once() -> None:
    """Of 4,096 nodes, each newcomer had a copy of all kept."""
    members = Members(0, memberships=[{0}], has_begun=False)
    for node in range(200):
        members.enter(node, handshake_of(node), Agent(None, 0.0))  # type: ignore[arg-type]
    assert sum(map(len, members.memberships)) <= 200
    members.begin()
    assert members.memberships == [set(range(200))]
    members.enter(200, handshake_of(200), Agent(None, 0.0))  # type: ignore[arg-type]
    assert members.memberships == [set(range(200)), set(range(201))], "some may not know of it yet"


def test_the_size_of_a_membership_is_that_of_its_nodes_whenever_they_change() -> None:
    membership = Membership({0: 0, 1: 1}, Budgets(1))
    assert membership.size == 2
    membership.nodes = {0: 0, 1: 0}
    assert membership.size == 1
