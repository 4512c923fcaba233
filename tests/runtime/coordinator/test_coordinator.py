"""A coordinator and its line to agents over real connections; the agents here are only their messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import declared_examples
import pytest
from kept_orders import begun, take, train
from waiting import PATIENCE_S

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.coordinator import lost_nodes, members, reports
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.coordinator.job_run import JobRun
from hyperpod_ext.runtime.coordinator.members import Members
from hyperpod_ext.runtime.coordinator.outbox import Outbox
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import PROTOCOL, Declared, encode, with_version
from hyperpod_ext.runtime.membership.actions import JobPhase
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.job_state_changes import changed
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.renumbering import Renumbering
from hyperpod_ext.runtime.operator_api import place_in_job
from hyperpod_ext.runtime.operator_api.place_in_job import find_place

SECRET = b"the secret of this test's job"
LEASE_S = 3.0


Heard = TypeVar("Heard", bound=Declared)


class Agent:
    """One agent's end of its connection."""

    def __init__(self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.node, self._reader, self._writer = node, reader, writer
        self.job_state: dict[str, Any] | None = None
        self.beating: asyncio.Task[None] | None = None
        self.behind_s = 0.0

    @classmethod
    async def come(cls, listener: ElectionListener, node: int, **said: Any) -> Agent:
        reader, writer = await asyncio.open_connection(*listener.address)
        await wire.join_peer(reader, writer, SECRET)
        agent = cls(node, reader, writer)
        agent.say_raw(with_version(encode(handshake_of(node, **said))))
        return agent

    def say(self, report: Declared) -> None:
        self.say_raw(encode(report))

    def say_raw(self, message: dict[str, Any]) -> None:
        self._writer.write(wire.encode(message))

    async def hears(self, kind: type[Heard]) -> Heard:
        """Next order of a kind; job states are acknowledged, as an agent does."""
        async with asyncio.timeout(PATIENCE_S):
            while (message := await wire.read(self._reader)) is not None:
                order = c.AGENT_ORDERS.decode(message)
                if isinstance(order, c.JobState):
                    self._has(order.job_state)
                elif isinstance(order, c.JobStateChange):
                    self._has(changed(self.job_state or {}, order.changes) | {"number": order.number})
                if isinstance(order, kind):
                    return order
        raise AssertionError(f"node {self.node} never heard {kind.__name__}")

    async def hears_until_the_end(self) -> list[Any]:
        """All that it is told before it is hung up on."""
        told = []
        async with asyncio.timeout(PATIENCE_S):
            while (message := await wire.read(self._reader)) is not None:
                told.append(c.AGENT_ORDERS.decode(message))
        return told

    async def hears_end(self) -> bool:
        """Whether it is hung up on without a word."""
        async with asyncio.timeout(PATIENCE_S):
            return await wire.read(self._reader) is None

    def _has(self, job_state: dict[str, Any]) -> None:
        self.job_state = job_state
        self.say(c.Acknowledged(number=job_state["number"]))

    @property
    def line(self) -> asyncio.WriteTransport:
        return self._writer.transport

    def hang_up(self) -> None:
        if self.beating is not None:
            self.beating.cancel()
        self._writer.close()

    async def beats(self) -> None:
        while True:
            self.say(c.Beat(clock=time.monotonic() - self.behind_s))
            await asyncio.sleep(LEASE_S / 6)


def handshake_of(node: int, **said: Any) -> c.AgentHandshake:
    known: dict[str, Any] = {"id": f"agent {node}", "pid": 1, "peer": ("", 2), "address": ("", 3), "domain": ""}
    state: dict[str, Any] = {"generation": 1, "committed": 0, "workers": {}, "exited": {}, "job_state": None}
    return c.AgentHandshake(node=node, **{**known, **state, **said})


@contextlib.asynccontextmanager
async def coordinating(
    tmp_path: Path, node: int = 0, spares: int = 1, checkpoint: CheckpointPolicy | None = None, **policy: Any
) -> AsyncIterator[Any]:
    config = RuntimeConfig(
        name="a",
        nodes=2,
        workers_per_node=1,
        spares=spares,
        restart=RestartPolicy(lease_s=LEASE_S, **policy),
        checkpoint=checkpoint or CheckpointPolicy(),
    )
    listener = ElectionListener(SECRET, lambda why: pytest.fail(why))
    await listener.open("127.0.0.1", 0)
    coordinator = Coordinator.first(config, node, tmp_path, 1)
    listener.lead_to(coordinator)
    try:
        yield listener, coordinator
    finally:
        await listener.close()
        if coordinator.ended.done():
            await coordinator.end.reported()  # in a thread, after the agents have the end
        coordinator.stop()


def all_events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in all_events(tmp_path) if event["event"] == kind]


def client_with(news: c.JobNews | None) -> Any:
    """What a node that looks for a coordinator elsewhere knows of the job."""
    return SimpleNamespace(news=news, has_coordinator=False, know_gone=lambda hosts, replaced: None)


async def three(listener: ElectionListener, *, behind_s: float = 0.0, **of_one: Any) -> list[Agent]:
    """Nodes 2 (a spare), 1 and 0, all with the first job state, 0 and 1 with a worker to start. `behind_s`: node 1's
    clock. `of_one`: what else it says of itself."""
    agents = [await Agent.come(listener, node, **(of_one if node == 1 else {})) for node in (2, 1, 0)][::-1]
    agents[1].behind_s = behind_s
    for agent in agents:
        agent.beating = asyncio.create_task(agent.beats())
    for agent in agents[:2]:
        assert (await agent.hears(c.StartWorker)).rank == agent.node
    await agents[2].hears(c.JobState)
    return agents


def test_when_a_line_ends_the_ranks_go_to_the_spare_and_everybody_hears_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            zero, one, two = await three(listener)
            one.hang_up()
            assert (await two.hears(c.StartWorker)).rank == 1
            while zero.job_state is None or zero.job_state["membership"]["nodes"] != {"0": 0, "1": 2}:
                await zero.hears(c.JobStateChange)
            assert set(zero.job_state["members"]) == {"0", "2"}

    asyncio.run(run())
    lost = events(tmp_path, "node_lost")[0]  # the others are hung up on when the test ends
    assert (lost["node"], lost["cause"]) == (1, "the connection to its agent closed")
    fault = events(tmp_path, "fault")[0]
    assert (fault["rank"], fault["escalation_level"], fault["kind"]) == (1, "node", "lost")


def test_an_agent_that_listens_for_a_moment_longer_than_its_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may close its connection before its listening socket."""
    monkeypatch.setattr(f"{__name__}.LEASE_S", 1000 * PATIENCE_S)
    monkeypatch.setattr(lost_nodes, "_PROBE", 1e-5)  # of that: a second

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: (writer.close(), server.close()), "127.0.0.1", 0)
        async with coordinating(tmp_path) as (listener, _):
            _, one, two = await three(listener, address=server.sockets[0].getsockname())
            one.hang_up()
            assert (await two.hears(c.StartWorker)).rank == 1

    asyncio.run(run())


def test_a_silent_node_is_lost_after_half_of_the_lease_and_told_to_stop_when_it_speaks_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            _, one, two = await three(listener)
            assert one.beating is not None
            one.beating.cancel()
            await two.hears(c.StartWorker)
            stop = await one.hears(c.StopNode)
            assert "was silent for" in stop.why
            again = await Agent.come(listener, 1, job_state=one.job_state)
            assert "because the node was lost" in (await again.hears(c.StopNode)).why

    asyncio.run(run())
    lost = events(tmp_path, "node_lost")[0]  # the others are hung up on when the test ends
    assert float(lost["cause"].split()[-2]) >= LEASE_S / 2


def test_a_coordinator_that_reaches_too_few_has_all_of_them_stop_and_writes_no_report(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            zero, one, two = await three(listener)
            one.hang_up()
            two.hang_up()
            assert "no majority" in (await zero.hears(c.StopNode)).why
            assert not coordinator.ended.done()

    asyncio.run(run())
    assert events(tmp_path, "stepped_down")
    assert not (tmp_path / "report.json").exists()


def test_what_the_log_has_is_not_told_again_to_whoever_coordinates_after_one_that_leaves(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            zero, one, _ = await three(listener)
            one.beating.cancel()  # each beat is answered with how many have come
            for _ in range(2):
                one.say(PROBE)
            while len(events(tmp_path, "probe")) < 2:
                await asyncio.sleep(0.01)
            zero.say(c.NodeBroken(cause="its disk is full", code="JobFailedError", lost=True))
            while (await one.hears(c.Heard)).heard != 2:
                pass
            one.say(PROBE)
            one.say(c.Beat())
            assert (await one.hears(c.Heard)).heard == 2, "the next coordinator is to hear of that"

    asyncio.run(run())
    assert len(events(tmp_path, "probe")) == 2


def test_a_coordinator_whose_node_has_left_hangs_up_on_the_others_and_stops_nobody(tmp_path: Path) -> None:
    """It still has to upload what is due there; what ranks report meanwhile is for the next one to hear."""

    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            agents = zero, one, _ = await three(listener)
            await running(agents)
            one.say(PROBE)
            while not events(tmp_path, "probe"):
                await asyncio.sleep(0.01)
            coordinator.actions._release((0,))
            acknowledging = [asyncio.create_task(agent.hears(c.Released)) for agent in agents]
            assert isinstance(await acknowledging[0], c.Released)
            for acknowledges in acknowledging[1:]:
                with pytest.raises(AssertionError, match="never heard"):
                    await acknowledges
            assert not {1, 2} & coordinator.members.agents.keys(), "and none of them is waited for"
            assert one.job_state is not None
            for said in ({"job_state": one.job_state, "term": 1}, {"id": "another"}):  # is it there after all?
                again = await Agent.come(listener, 1, **said)
                assert await again.hears_until_the_end() == []
            assert zero.line.is_closing() is False

    asyncio.run(run())
    assert [event["event"] for event in all_events(tmp_path)][-1] == "stepped_down", "no node is lost by that"


def test_what_the_log_has_is_told_before_the_others_are_hung_up_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(RuntimeConfig(name="a", nodes=2, workers_per_node=1, spares=1), tmp_path) as (made, lines):
            train(made)
            take(made, 1, PROBE)
            made.actions._release((0,))
            for node in lines:
                take(made, node, c.Acknowledged(number=made.members.number))
            assert [line.closed for _, line in sorted(lines.items())] == [False, True, True]
            assert lines[1].orders[-1] == c.Heard(heard=1)

    asyncio.run(run())


def test_without_a_spare_the_time_for_another_node_ends_the_job(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path, spares=0, node_wait_s=0.2) as (listener, _):
            zero, one = await Agent.come(listener, 0), await Agent.come(listener, 1)
            await zero.hears(c.StartWorker)
            one.hang_up()
            assert (await zero.hears(c.EndJob)).state == "failed"

    asyncio.run(run())
    error = json.loads((tmp_path / "report.json").read_text())["error"]
    assert "node 1 is lost at step 1: the connection to its agent closed; the job has no spares" in error["message"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"node": 3}, "none of this job's 2 nodes and 1 spares"),
        ({"node": 1}, "another agent is connected as this node"),
    ],
)
def test_who_does_not_belong_is_told_why(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            await three(listener)
            other = await Agent.come(listener, said["node"], id="another")
            assert why in (await other.hears(c.StopNode)).why

    asyncio.run(run())


def test_a_pod_whose_rank_another_node_has_gets_the_number_of_the_lost_one(tmp_path: Path) -> None:
    """AWS's operator may give ranks in another order after a fault; the job's nodes keep their numbers."""

    async def run() -> None:
        async with coordinating(tmp_path, spares=0, node_wait_s=60.0) as (listener, coordinator):
            stranger = ElectionListener(SECRET, lambda why: pytest.fail(why))
            await stranger.open("127.0.0.1", 0)
            asked = [("127.0.0.1", 9), stranger.address, listener.address]

            async def place(wanted: int, *, of: Any = asked, goes_on: bool = True) -> Any:
                settings = settings_of(coordinator, wanted, tmp_path, listener.address)
                return await find_place(settings, of, 10.0, lambda: goes_on)

            assert await place(1) is None, "the job begins, with this one as it was told"
            assert await place(1, of=asked[:2]) is None, "nobody is in a job"
            zero, one = await Agent.come(listener, 0), await Agent.come(listener, 1)
            for agent in (zero, one):
                agent.beating = asyncio.create_task(agent.beats())
            await zero.hears(c.JobState)
            listener.client = client_with(NEWS)  # as agents do that are in the job
            told = asyncio.create_task(place(0))  # both are there, as far as anybody knows
            one.hang_up()
            assert await told == (1, listener.address)
            assert await place(1) == (1, listener.address)
            stranger.client = client_with(NEWS)
            assert await place(0, of=asked[:2], goes_on=False) is None, "it was stopped while it looked"
            knows = NEWS.model_copy(update={"candidates": {0: listener.address}})
            stranger.client = client_with(knows)
            assert await place(0, of=asked[:2]) == (1, listener.address), "whoever is asked says who coordinates"
            await stranger.close()

    asyncio.run(run())


def test_a_pod_does_not_wait_for_one_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on a machine that is lost, too."""
    monkeypatch.setattr(place_in_job, "_DIAL_S", 3600.0)  # who waits for it waits longer than a test may take

    async def run() -> None:
        async with coordinating(tmp_path, spares=0, node_wait_s=60.0) as (listener, coordinator):
            zero, one = await Agent.come(listener, 0), await Agent.come(listener, 1)
            zero.beating = asyncio.create_task(zero.beats())
            await zero.hears(c.JobState)
            listener.client = client_with(NEWS)
            one.hang_up()
            other = ElectionListener(SECRET, lambda why: pytest.fail(why))
            await other.open("127.0.0.1", 0)
            other.client = client_with(NEWS.model_copy(update={"candidates": {0: listener.address}}))
            settings = settings_of(coordinator, 1, tmp_path, listener.address)
            with socket.create_server(("127.0.0.1", 0)) as silent:
                for asked in (listener.address, other.address):
                    others = [silent.getsockname(), asked]
                    assert await find_place(settings, others, 10.0, lambda: True) == (1, listener.address)
            await other.close()

    asyncio.run(run())


NEWS = c.JobNews(
    term=1, coordinator=0, candidates={}, members=2, master_port=1, world_size=2, nodes=2, moved_in=0, spares=False,
    servers_lost=0,
)  # fmt: skip


def settings_of(coordinator: Coordinator, node: int, folder: Path, first: tuple[str, int]) -> NodeSettings:
    return NodeSettings(coordinator.job.run.config, node, *first, ["a.py"], folder, folder, folder / "secret", SECRET)


def test_one_that_does_not_read_is_cut_while_the_job_goes_on_and_is_taken_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel does not take for it, the coordinator keeps, up to what it is allowed."""
    monkeypatch.setattr(members, "MOST_UNREAD_BYTES", 1 << 16)

    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            _, one, two = await three(listener)
            line, unread = coordinator.members.agents[1].writer.transport, 0
            for end, buffer in ((line, socket.SO_SNDBUF), (one.line, socket.SO_RCVBUF)):
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, buffer, 1 << 12)
            while not line.is_closing():
                one.say(c.AskJobState())
                await asyncio.sleep(0)
                unread = max(unread, line.get_write_buffer_size())
            assert (await two.hears(c.StartWorker)).rank == 1
            state = json.dumps(coordinator.members.members).encode()
            assert unread < (1 << 16) + 10 * len(state)
            one.hang_up()
            again = await Agent.come(listener, 1, id="another")
            assert (await again.hears(c.JobNews)).spares

    asyncio.run(run())
    assert events(tmp_path, "node_lost")[0]["node"] == 1
    assert [event["node"] for event in events(tmp_path, "node_joined")][-1] == 1


def test_a_successor_goes_on_with_what_the_voters_know(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            two = (await three(listener))[2]
        config = RuntimeConfig(name="a", nodes=2, workers_per_node=1, spares=1, restart=RestartPolicy(lease_s=LEASE_S))
        listener = ElectionListener(SECRET, lambda why: pytest.fail(why))
        await listener.open("127.0.0.1", 0)
        assert two.job_state is not None
        known = {"job_state": two.job_state, "generation": 4, "committed": 7}
        voter = await Agent.come(listener, 2, **known)
        assert await listener.wait_for_majority({0, 1, 2}, 1, 5.0)
        assert not await listener.wait_for_majority({0, 1, 2, 3}, 1, 0.05)
        own = handshake_of(1, **known)
        listener.lead_to(Coordinator.successor(config, 1, tmp_path, own, list(listener.votes.values())))
        me = await Agent.come(listener, 1, **{**known, "workers": {1: c.RunningWorker(pid=1, step=8)}})
        for agent in (me, voter):
            assert (await agent.hears(c.AbortGeneration)).generation == 5
        assert (await voter.hears(c.StartWorker)).rank == 0
        assert (me.job_state or voter.job_state or {})["term"] == 2
        await listener.close()

    asyncio.run(run())
    (took,) = events(tmp_path, "coordinator")
    assert (took["node"], took["before"], took["term"]) == (1, 0, 2)
    assert len(events(tmp_path, "job_started")) == 1
    assert events(tmp_path, "fault")[0]["step"] == 8


def test_a_successor_that_hears_from_outside_who_is_gone_needs_no_majority_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            one = (await three(listener))[1]
            while one.job_state is None or len(one.job_state["members"]) < 3:
                await one.hears(c.JobStateChange)
        config = RuntimeConfig(name="a", nodes=2, workers_per_node=1, spares=1, restart=RestartPolicy(lease_s=LEASE_S))
        own = handshake_of(1, job_state=one.job_state, generation=4, committed=7)
        made = Coordinator.successor(config, 1, tmp_path, own, [], frozenset({0, 2}))
        assert (set(made.members.members), made.members.expected) == ({1}, {})
        assert all(members == {1} for members in made.members.memberships)
        assert made.membership.held == {1}, "who has stopped all says when they go on"
        assert not made.members.stepped_down
        made.stop()

    asyncio.run(run())


def test_who_is_new_waits_where_a_coordinator_is_looked_for_and_asks_elsewhere_once_there_is_one() -> None:
    async def run() -> None:
        listener = ElectionListener(SECRET, lambda why: pytest.fail(why))
        listener.client = elsewhere = client_with(None)
        await listener.open("127.0.0.1", 0)
        new = await Agent.come(listener, 0)
        voter = await Agent.come(listener, 2, term=1)
        assert await listener.wait_for_majority({0, 1, 2}, 1, 5.0)
        elsewhere.has_coordinator = True
        assert await new.hears_end()
        assert await (await Agent.come(listener, 0)).hears_end()
        assert set(listener.votes) == {2}, "who knows the job decides for itself how long to wait"
        voter.hang_up()
        await listener.close()

    asyncio.run(run())


@pytest.mark.parametrize(("members", "lost"), [((0, 1), 4), ((1,), 3)])
def test_only_the_memory_of_a_coordinator_that_did_not_leave_the_job_is_lost(
    tmp_path: Path, members: tuple[int, ...], lost: int
) -> None:
    """Else uploads that wait for nobody would be given up."""
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=1, spares=1)
    before = {"coordinator": 0, "members": {str(node): {} for node in members}, "servers_lost": 3}
    run, membership = JobRun(config, 1, tmp_path, 1, "run", 2), Membership({0: 1}, Budgets(1))
    assert Outbox(run, Members(1), membership, before)._make_job_state()["servers_lost"] == lost


def test_each_node_hears_of_its_parity_group_alone_and_a_successor_keeps_the_groups(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(parity=3)))
    config = RuntimeConfig(name="a", nodes=6, workers_per_node=2, spares=1, checkpoint=policy)
    run, members = JobRun(config, 0, tmp_path, 1, "run", 1), Members(1)
    membership = Membership({rank: rank // 2 for rank in range(12)}, Budgets(1))

    def come(node: int) -> None:
        members.members[node] = {"peer": ("10.0.0.1", 1000 + node), "domain": f"rack {node % 3}"}
        members.version += 1

    def groups(outbox: Outbox) -> dict[int, tuple[int, ...]]:
        outbox._assign()
        for node, assignment in outbox._assignments.items():
            assert set(assignment.peers) == {node, *assignment.group} & members.members.keys()
            assert all(ranks == (2 * of, 2 * of + 1) for of, ranks in assignment.group.items() if of < 6)
        return {node: tuple(assignment.group) for node, assignment in outbox._assignments.items()}

    outbox = Outbox(run, members, membership)
    for node in range(5):
        come(node)
    assert set(groups(outbox).values()) == {()}  # one is still to come, and racks are to be spread
    come(5)
    first = groups(outbox)
    assert all({node % 3 for node in group} == {0, 1, 2} for group in first.values())
    others = set(first[4]) - {4}
    del members.members[4]
    members.version += 1
    assert groups(outbox)[min(others)] == ()
    come(6)
    membership.nodes = {rank: 6 if node == 4 else node for rank, node in membership.nodes.items()}
    successor = Outbox(run, members, membership, outbox._make_job_state())
    after = groups(successor)
    assert set(after[6]) == {6} | others
    assert successor._assignments[6].group[6] == (8, 9)


def test_who_waits_for_a_world_that_its_coordinator_took_with_it_gets_a_number_of_the_next_one(tmp_path: Path) -> None:
    """The coordinator dies when some have entered a world of four: a worker that waits for that begins anew."""
    elastic = Elastic(min_nodes=1, max_nodes=4)
    config = RuntimeConfig(
        name="a", nodes=3, workers_per_node=1, elastic=elastic, restart=RestartPolicy(lease_s=LEASE_S)
    )
    entered = Membership({rank: rank for rank in range(4)}, Budgets(10), generation=2, committed=7)
    entered.renumbering = Renumbering({2: {0: 0, 1: 1, 2: 2}})

    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            two = (await three(listener))[2]
        assert two.job_state is not None
        members = {**two.job_state["members"], "3": two.job_state["members"]["2"] | {"id": "agent 3"}}
        job_state = two.job_state | {"members": members, "membership": json.loads(json.dumps(entered.to_json()))}
        listener = ElectionListener(SECRET, lambda why: pytest.fail(why))
        await listener.open("127.0.0.1", 0)
        late = {"job_state": job_state, "generation": 1, "committed": 7, "moved_in": 0}
        voters = [
            await Agent.come(listener, 2, **late | {"workers": {2: c.RunningWorker(pid=1, step=8)}}),
            await Agent.come(listener, 3, **late | {"workers": {3: c.RunningWorker(pid=1, step=0, joining=True)}}),
        ]
        assert await listener.wait_for_majority({0, 1, 2, 3}, 1, 5.0)
        listener.lead_to(
            Coordinator.successor(config, 1, tmp_path, handshake_of(1, **late), list(listener.votes.values()))
        )
        for agent in voters:
            abort = await agent.hears(c.AbortGeneration)
            assert (abort.drop_joining, abort.generation, abort.moved_in) == (True, 4, 4)
            assert abort.moved == {1: 1, 2: 2}
        assert (await voters[1].hears(c.StartWorker)).rank == 0
        await listener.close()

    asyncio.run(run())
    assert events(tmp_path, "world")[0]["nodes"] == 3


def test_what_another_machine_reports_is_timed_by_the_clock_of_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            zero, one, _two = await three(listener, behind_s=1000.0)
            for agent in (zero, one):
                there = time.monotonic() - agent.behind_s
                agent.say(c.Beat(clock=there))
                fields = {"began": there - 2.0, "seconds": 2.0, "node": agent.node}
                agent.say(c.Event(event="imported", t=there, fields=fields))
            while len(events(tmp_path, "imported")) < 2:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 30))
    (joined, *_) = events(tmp_path, "node_joined")
    for event in events(tmp_path, "imported"):
        assert 0.0 <= event["t"] - joined["t"] < 30.0
        assert event["t"] - event["began"] == pytest.approx(2.0)


def test_a_rank_that_does_not_join_in_time_is_a_fault_of_its_own_kind(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            agents = await three(listener)
            agents[0].say(c.Join(rank=0, pid=1, live=None, store_port=1, generation=1))
            while not events(tmp_path, "joined"):
                await asyncio.sleep(0)
            coordinator.job.formation.limit_s = 0.1
            assert (await agents[1].hears(c.StartWorker)).rank == 1

    asyncio.run(asyncio.wait_for(run(), 30))
    fault = events(tmp_path, "fault")[0]
    assert (fault["rank"], fault["kind"], fault["died"]) == (1, "late", True), "its node is there"


def test_a_log_that_cannot_be_written_costs_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            agents = await three(listener)
            with monkeypatch.context() as full:
                full.setattr(
                    coordinator.events, "_append", lambda line: os.writev(os.open("/dev/full", os.O_WRONLY), [line])
                )
                for agent in agents:
                    agent.say(c.Event(event="imported", t=1.0, fields={"seconds": 0.1}))
                    agent.say(c.AskJobState())
                    await agent.hears(c.JobState)
            assert not events(tmp_path, "imported")
            agents[1].say(c.Event(event="imported", t=2.0, fields={"seconds": 0.1}))
            while "3 events could not be written here" not in (tmp_path / "events.jsonl").read_text():
                await asyncio.sleep(0.01)
            assert set(coordinator.members.agents) == {0, 1, 2}

    asyncio.run(body())


def test_a_search_that_breaks_ends_the_job_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(now: float) -> None:
        raise KeyError("rank 7")

    async def body() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            agents = await three(listener)
            monkeypatch.setattr(coordinator.reports, "late_ranks", broken)
            assert (await agents[1].hears(c.EndJob)).state == "failed"
            await coordinator.end.reported()
        error = json.loads((tmp_path / "report.json").read_text())["error"]
        assert "KeyError: 'rank 7'" in error["message"]

    asyncio.run(body())


def test_the_end_is_told_while_the_report_of_a_long_log_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threading.Event()

    def takes_long(path: Path, **_: Any) -> dict[str, Any]:
        assert made.wait(PATIENCE_S)
        return {"of": path.name, "warnings": []}

    monkeypatch.setattr("hyperpod_ext.runtime.events.log.report_on", takes_long)

    async def body() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            agents = await three(listener)
            coordinator.cancel()
            for agent in agents:
                assert (await agent.hears(c.EndJob)).state == "cancelled"
            assert not (tmp_path / "report.json").exists()
            made.set()
            await coordinator.end.reported()
            assert json.loads((tmp_path / "report.json").read_text()) == {"of": "events.jsonl", "warnings": []}

    asyncio.run(body())


def test_an_event_is_logged_with_all_that_its_sender_says_and_with_nothing_else(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            agents = await three(listener)
            agents[1].say(c.Event(event="worker_started", t=1.0, generation=1, fields={"rank": 1, "pid": 7, "node": 1}))
            agents[1].say(c.Event(event="metric", t=2.0, generation=1, rank=1, fields={"loss": 0.5, "event": "go"}))
            while not events(tmp_path, "metric"):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 30))
    (started,), (metric,) = events(tmp_path, "worker_started"), events(tmp_path, "metric")
    assert started == {"t": 1.0, "event": "worker_started", "generation": 1, "rank": 1, "pid": 7, "node": 1}
    assert metric == {"t": 2.0, "event": "metric", "generation": 1, "loss": 0.5, "rank": 1}


async def running(agents: list[Agent], *, durable: bool = False) -> None:
    """Have ranks 0 and 1 train, in generation 1. `durable`: there are such tiers, which hold nothing."""
    for rank, agent in enumerate(agents[:2]):
        agent.say(c.Join(rank=rank, pid=1, live=None, store_port=1, generation=1))
    if durable:
        await agents[0].hears(c.AskDurableTiers)
        agents[0].say(c.DurableAnswer(checkpoints=(), newest_generation=0, problems=(), unreachable=()))
    for rank, agent in enumerate(agents[:2]):
        await agent.hears(c.BeginGeneration)
        agent.say(c.Restored(rank=rank, generation=1, attempt=1, error=""))
    for agent in agents[:2]:
        await agent.hears(c.GoOn)


PROBE = c.Event(event="probe", t=0.0, generation=1, fields={})
BROKE = c.Event(event="collective_broke", t=0.0, rank=1, generation=1, fields={"step": 3, "cause": "EOF"})


def test_a_connection_that_ended_is_a_fault_once_every_agent_says_that_its_ranks_live(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            agents = await three(listener)
            await running(agents)
            for _ in range(2):
                agents[1].say(BROKE)
            for agent in agents[:2]:
                await agent.hears(c.AskAlive)
                assert events(tmp_path, "fault") == []
                agent.say(c.Alive(generation=1))
            assert (await agents[0].hears(c.AbortGeneration)).generation == 2
            for agent in agents:
                agent.hang_up()

    asyncio.run(run())
    fault = events(tmp_path, "fault")[0]
    assert (fault["rank"], fault["step"], fault["cause"], fault["escalation_level"]) == (1, 3, "EOF", "in process")
    assert fault["kind"] == "connection", "no training function has raised"


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_node_whose_connection_has_ended_is_asked_when_it_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """The node may be lost, so the answers of the others are not enough."""
    monkeypatch.setattr(f"{__name__}.LEASE_S", 1000 * PATIENCE_S)

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        async with coordinating(tmp_path) as (listener, coordinator), asyncio.timeout(PATIENCE_S):
            zero, one, two = agents = await three(listener, address=address)
            await running(agents)
            broke = c.Event(event="collective_broke", t=0.0, rank=0, generation=1, fields=BROKE.fields)
            if asked == "before":
                zero.say(broke)
                await one.hears(c.AskAlive)
            one.hang_up()
            while 1 not in coordinator.members.doubted:
                await asyncio.sleep(0)
            if asked == "after":
                zero.say(broke)
            for agent in (two, zero):
                await agent.hears(c.AskAlive)
                agent.say(c.Alive(generation=1))
                agent.say(c.AskJobState())
                await agent.hears(c.JobState)
            assert events(tmp_path, "fault") == []
            again = await Agent.come(listener, 1, job_state=one.job_state, address=address)
            await again.hears(c.AskAlive)
            again.say(c.Alive(generation=1))
            assert (await zero.hears(c.AbortGeneration)).generation == 2
            for agent in (zero, two, again):
                agent.hang_up()
        server.close()

    asyncio.run(run())
    (fault,) = [each for each in events(tmp_path, "fault") if each["kind"] == "connection"]
    assert fault["rank"] == 0


def test_a_death_that_is_told_meanwhile_is_the_only_fault(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            agents = await three(listener)
            await running(agents)
            agents[1].say(BROKE)
            for agent in agents:
                await agent.hears(c.AskAlive)
            where = {"step": 3, "phase": "", "place": "", "t": 0.0}
            how = {"cause": "killed by SIGKILL (9)", "kind": "signal", "exit_code": -9, "final": False, "hint": ""}
            agents[0].say(c.Died(rank=0, generation=1, **where, **how))
            await agents[0].hears(c.AbortGeneration)
            for agent in agents:
                agent.say(c.Alive(generation=1))
            agents[0].say(c.Join(rank=0, pid=1, live=None, store_port=1, generation=2))
            agents[1].say(c.Join(rank=1, pid=1, live=None, store_port=1, generation=2))
            await agents[0].hears(c.BeginGeneration)
            assert [fault["rank"] for fault in events(tmp_path, "fault")] == [0]

    asyncio.run(run())


@pytest.mark.parametrize("ends", [False, True])
def test_no_node_leaves_a_job_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Its ranks are asked to stop after a step that all of them save: they stay together for that."""
    monkeypatch.setattr(reports, "_TOGETHER_S", 0.0)  # the node would leave at once, and nothing waits for a clock
    rare = CheckpointPolicy(tiers=(MemoryTier(every_steps=5), FileTier(path="/d", every_steps=5)))

    async def run() -> None:
        async with coordinating(tmp_path, checkpoint=rare, policy="continue") as (listener, coordinator):
            agents = await three(listener)
            await running(agents, durable=True)
            if ends:
                coordinator.cancel()
                await agents[1].hears(c.AskStop)
            agents[1].say(c.Leave())
            if not ends:
                await agents[0].hears(c.AbortGeneration)
            for _ in range(3):
                agents[1].say(c.Beat())
                await agents[1].hears(c.Heard)

    asyncio.run(run())
    assert [event["node"] for event in events(tmp_path, "node_leaves")] == ([] if ends else [1])


# --- the last step comes home -----------------------------------------------------------------------

DURABLE = CheckpointPolicy(tiers=(MemoryTier(), FileTier(path="/d", every_steps=5)))


def held_by(node: int) -> tuple[c.HeldSnapshot, ...]:
    """Of the last step, on the node of each rank; a spare has none."""
    known = {"world_size": 2, "step": 13, "generation": 1, "save_id": "g1-s13", "own_digest": "", "content": ""}
    return (c.HeldSnapshot(rank=node, sharing="same", **known),) if node < 2 else ()


async def all_are_done(listener: ElectionListener, coordinator: Coordinator) -> list[Agent]:
    """Both ranks have ended well; the agents of both nodes and of the spare are to bring home what they hold."""
    agents = await three(listener)
    coordinator.membership.phase = JobPhase.ENDED
    coordinator.membership.step_committed(13)
    for rank in (0, 1):
        agents[rank].say(c.Exited(rank=rank, code=0))
    for agent in agents:
        await agent.hears(c.SaveLast)
    return agents


def tell_of_part(agent: Agent, *tiers: dict[str, Any]) -> None:
    fields = {"node": agent.node, "in_time": True, "limit_s": 60.0, "tiers": tiers}
    agent.say(c.Event(event="uploaded", t=0.0, fields=fields))
    agent.say(c.Uploaded())


def test_a_job_succeeds_once_every_node_has_brought_home_its_part_of_the_last_step(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path, checkpoint=DURABLE) as (listener, coordinator):
            agents = await all_are_done(listener, coordinator)
            late = await Agent.come(listener, 3)  # it is none of this job, and holds nobody up
            await late.hears(c.StopNode)
            for agent in agents:
                agent.say(c.LastSnapshots(held=held_by(agent.node)))
            for agent in agents:
                assert (await agent.hears(c.UploadSnapshot)).save_id == "g1-s13"
            there = {"tier": "/d/a", "arrived": True, "newest_step": 13, "left_ranks": [], "left_bytes": 0, "error": ""}
            tell_of_part(agents[1], there)
            tell_of_part(agents[2])
            agents[1].say(c.Beat())
            await agents[1].hears(c.Heard)
            assert not coordinator.ended.done()
            assert not (tmp_path / "report.json").exists()
            tell_of_part(agents[0], there)
            assert (await agents[2].hears(c.EndJob)).state == "succeeded"

    asyncio.run(run())
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["state"], report["warnings"]) == ("succeeded", [])
    assert report["durable"] == [{"tier": "/d/a", "newest_step": 13}]


def test_a_node_that_is_lost_on_the_way_home_ends_nobodys_job_and_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path, checkpoint=DURABLE) as (listener, coordinator):
            zero, one, two = await all_are_done(listener, coordinator)
            for agent in (zero, one, two):
                agent.say(c.LastSnapshots(held=held_by(agent.node)))
            await two.hears(c.UploadSnapshot)
            one.hang_up()
            waited = {
                "tier": "/d/a",
                "arrived": False,
                "newest_step": 10,
                "left_ranks": [],
                "left_bytes": 0,
                "error": "",
            }
            tell_of_part(two)
            tell_of_part(zero, waited)
            assert (await zero.hears(c.EndJob)).state == "succeeded"

    asyncio.run(run())
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["state"], report["nodes_lost"]) == ("succeeded", [1])
    (line,) = report["warnings"]
    assert "step 13 is not in /d/a, and the newest durable step there is 10: node 0 waited for other nodes" in line
    assert "node 1 was lost" in line


def test_a_job_that_is_cancelled_on_its_way_home_has_its_grace(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path, checkpoint=DURABLE) as (listener, coordinator):
            agents = await all_are_done(listener, coordinator)
            agents[1].say(c.CancelJob())
            for agent in agents:
                end = await agent.hears(c.EndJob)
                assert (end.state, end.grace_s) == ("cancelled", DURABLE.grace_s)

    asyncio.run(run())


# --- what is damaged --------------------------------------------------------------------------------


def test_an_agent_of_another_version_is_told_so_and_so_is_the_coordinators_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            reader, writer = await asyncio.open_connection(*listener.address)
            await wire.join_peer(reader, writer, SECRET)
            other = Agent(0, reader, writer)
            other.say_raw({**encode(handshake_of(0)), "protocol": PROTOCOL + 1})
            stop = await other.hears(c.StopNode)
            assert f"speaks version {PROTOCOL} of the job's protocol" in stop.why
            assert f"version {PROTOCOL + 1}: start all nodes from one image" in stop.why

    asyncio.run(run())
    assert f"version {PROTOCOL + 1}: start all nodes from one image" in capsys.readouterr().err


def test_damaged_messages_are_refused_by_name_and_cost_nobody_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(7)

    async def run() -> None:
        async with coordinating(tmp_path) as (listener, _):
            agents = await three(listener)
            for kind in list(c.AGENT_REPORTS) * 20:
                right = json.loads(json.dumps(encode(declared_examples.example(kind, random))))
                agents[1].say_raw({**right, "extra": 1})
            agents[1].say(c.Event(event="rank_stopped", t=0.0, fields={"rank": 1, "step": 1}))
            while not (await agents[1].hears(c.Heard)).heard:
                pass
            for agent in agents:
                assert agent.beating is not None
                agent.beating.cancel()

    asyncio.run(run())
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 20 * len(list(c.AGENT_REPORTS))
    assert all(line.startswith("the coordinator refused a message of node 1: ") for line in told)
    assert "the coordinator refused a message of node 1: join: field `extra` is unknown" in told


def stood_still(coordinator: Coordinator, *agents: Agent) -> None:
    """As if its process had not run for a lease: others may have another since. These agents say no more."""
    for agent in agents:
        assert agent.beating is not None
        agent.beating.cancel()
    coordinator.lost_nodes.ran_at -= LEASE_S
    coordinator.lost_nodes.notice_pause(time.monotonic())


def test_a_coordinator_that_stood_still_counts_nothing_until_the_others_show_that_they_have_no_other(
    tmp_path: Path,
) -> None:
    """Beats that were sent before may be read now, and connections end of nodes that went to another."""

    async def run() -> None:
        async with coordinating(tmp_path, max_node_losses=0) as (listener, coordinator):
            zero, one, two = await three(listener)
            before = time.monotonic()
            stood_still(coordinator, zero, two)
            one.hang_up()
            two.say(c.Beat(clock=before))
            coordinator.end.end("failed")
            assert (events(tmp_path, "node_lost"), coordinator.ended.done()) == ([], False)
            one = await Agent.come(listener, 1, job_state=zero.job_state)
            await one.hears(c.JobNews)
            assert coordinator.ended.result() == "failed", "of three, two are enough"

    asyncio.run(run())
    assert events(tmp_path, "node_lost") == []


def test_a_beat_that_is_sent_after_it_stood_still_shows_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            zero, one, two = await three(listener)
            stood_still(coordinator, zero, one, two)
            assert coordinator.members.unsure_since is not None
            two.say(c.Beat(clock=coordinator.members.unsure_since - 0.001))
            two.say(c.AskJobState())
            await two.hears(c.JobState)  # so what was said before has been read
            assert coordinator.members.unsure_since is not None
            two.say(c.Beat(clock=time.monotonic()))
            two.say(c.AskJobState())
            await two.hears(c.JobState)
            assert coordinator.members.unsure_since is None

    asyncio.run(run())


def test_a_coordinator_that_stood_still_and_is_followed_by_nobody_steps_down_and_ends_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            zero, one, two = await three(listener)
            stood_still(coordinator, zero, one, two)
            coordinator.cancel()
            assert "no majority" in (await zero.hears(c.StopNode)).why
            assert not coordinator.ended.done()

    asyncio.run(run())
    assert events(tmp_path, "stepped_down")
    assert not (tmp_path / "report.json").exists()


def test_a_coordinator_whose_connections_end_one_after_the_other_ends_nothing_that_others_may_go_on_with(
    tmp_path: Path,
) -> None:
    """The first one lost would end the job; but it is this node that is cut off."""

    async def run() -> None:
        async with coordinating(tmp_path, max_node_losses=0) as (listener, coordinator):
            zero, one, two = await three(listener)
            one.hang_up()
            two.hang_up()
            assert "no majority" in (await zero.hears(c.StopNode)).why
            assert not coordinator.ended.done()

    asyncio.run(run())
    assert not (tmp_path / "report.json").exists()


def test_a_coordinator_whose_job_was_stopped_from_outside_waits_for_that_word_after_it_stood_still(
    tmp_path: Path,
) -> None:
    """The others are stopped as well, and may be taken away: whoever has stopped them says who goes on."""

    async def run() -> None:
        async with coordinating(tmp_path) as (listener, coordinator):
            _, one, two = await three(listener)
            stood_still(coordinator)
            coordinator.membership.held.add(0)
            one.hang_up()
            two.hang_up()
            await asyncio.wait_for(lost(coordinator, 2), 20)
            assert not coordinator.members.stepped_down

    async def lost(coordinator: Coordinator, count: int) -> None:
        while len(events(tmp_path, "node_lost")) < count:
            await asyncio.sleep(0.02)

    asyncio.run(run())
    assert events(tmp_path, "stepped_down") == []


async def stopped_for_fault(agent: Agent, coordinator: Coordinator) -> None:
    agent.say(c.HoldTraining(for_fault=True))
    async with asyncio.timeout(PATIENCE_S):
        while agent.node not in coordinator.membership.held:
            await asyncio.sleep(0.02)


def test_a_stop_from_outside_for_a_fault_holds_the_only_node_that_is_left_of_a_job_that_continues(
    tmp_path: Path,
) -> None:
    """The others may train elsewhere."""

    async def run() -> None:
        async with coordinating(tmp_path, policy="continue") as (listener, coordinator):
            zero, one, two = await three(listener)
            coordinator.membership.began[1] = 0
            await stopped_for_fault(zero, coordinator)
            for agent, count in ((two, 1), (one, 2)):
                agent.hang_up()
                async with asyncio.timeout(PATIENCE_S):
                    while len(events(tmp_path, "node_lost")) < count:
                        await asyncio.sleep(0.02)
            assert (coordinator.membership.held, coordinator.membership.unassigned) == ({0}, {1})

    asyncio.run(run())
    assert events(tmp_path, "world") == []
    assert events(tmp_path, "stepped_down") == []


def test_a_stop_from_outside_for_a_fault_that_comes_before_the_loss_is_noticed_holds_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinating(tmp_path, policy="continue") as (listener, coordinator):
            zero, one, _ = await three(listener)
            coordinator.membership.began[1] = 0
            await stopped_for_fault(zero, coordinator)
            one.hang_up()
            assert (await zero.hears(c.AbortGeneration)).rank == 1
            assert coordinator.membership.held == set()

    asyncio.run(run())
    assert [event["cause"] for event in events(tmp_path, "world")] == ["continued"]
