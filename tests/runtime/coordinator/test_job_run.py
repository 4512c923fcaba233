"""What ranks have reported, and how long a generation may take to form."""

from __future__ import annotations

import asyncio

from hyperpod_ext.runtime.coordinator.actions import Timers
from hyperpod_ext.runtime.coordinator.job_run import Formation, Ranks
from hyperpod_ext.runtime.coordinator.members import MOST_UNREAD_BYTES, Agent, Members


def test_a_step_is_committed_by_all_once_every_rank_has_said_so() -> None:
    ranks = Ranks()
    assert (ranks.newest(4), ranks.committed_by_all(2)) == (4, None)
    ranks.committed(0, 7)
    assert (ranks.newest(4), ranks.committed_by_all(2)) == (7, None)
    ranks.committed(1, 6)
    assert (ranks.newest(4), ranks.committed_by_all(2)) == (7, 6)
    ranks.begins()
    assert (ranks.newest(4), ranks.committed_by_all(2)) == (4, None)


def test_a_generation_is_late_once_each_time_that_its_limit_is_over() -> None:
    formation = Formation(limit_s=10.0)
    assert not formation.is_late(100.0), "the job has not begun"
    formation.begins(100.0)
    assert [formation.is_late(now) for now in (109.0, 110.0, 111.0, 120.0)] == [False, True, False, True]


def test_members_that_are_silent_or_never_came_are_overdue() -> None:
    members = Members(0, expected={3: 50.0})
    for node, heard_at in ((0, 0.0), (1, 40.0), (2, 44.0)):
        members.agents[node] = Agent(None, heard_at)  # type: ignore[arg-type]
    assert set(members.overdue(46.0, lease_s=10.0)) == {1}, "the coordinator's own node is not"
    assert set(members.overdue(51.0, lease_s=10.0)) == {1, 2, 3}
    members.was_paused(51.0, lease_s=10.0)
    assert set(members.overdue(51.0, lease_s=10.0)) == {3}


def test_a_node_is_released_once_every_member_knows_that_it_is_none() -> None:
    members = Members(0, memberships=[{0, 1}], members={0: {}, 1: {}}, number=1)
    for node in (0, 1):
        members.agents[node] = Agent(None, 0.0, acknowledged=1)  # type: ignore[arg-type]
    members.forget(1)
    members.number = 2
    members.acknowledged(0, 2)
    assert members.released() == set()
    members.acknowledged(1, 2)
    assert members.released() == {1}


def test_a_timer_that_is_set_again_replaces_the_one_before() -> None:
    async def run() -> list[str]:
        timers, called = Timers(), list[str]()
        done = asyncio.Event()
        timers.set("a 1", 0.0, lambda: called.append("first"))
        timers.set("a 1", 0.0, lambda: called.append("second"))
        timers.set("b", 0.0, lambda: called.append("cancelled"))
        timers.cancel("b")
        timers.set("c", 0.0, done.set)
        await done.wait()
        return called

    assert asyncio.run(run()) == ["second"]


class Unread:
    """A connection whose other end does not read."""

    def __init__(self) -> None:
        self.transport, self.unread, self.cut = self, 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, frame: bytes) -> None:
        self.unread += len(frame)

    def abort(self) -> None:
        self.cut = True


def test_the_connection_of_an_agent_that_does_not_read_is_cut() -> None:
    line, frame = Unread(), bytes(MOST_UNREAD_BYTES // 2)
    agent = Agent(line, 0.0)  # type: ignore[arg-type]
    for _ in range(9):
        agent.send(frame)
    assert line.cut
    assert line.unread <= 2 * MOST_UNREAD_BYTES
