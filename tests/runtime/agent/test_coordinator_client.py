"""What an agent says to the coordinator, and to the node that is about to become it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient, ExcludedError
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode, with_version

SECRET = b"0123456789abcdef"
CONFIG = RuntimeConfig(name="a", nodes=3, workers_per_node=1)
DEATH = c.Died(
    rank=0, exit_code=-9, cause="killed by SIGKILL (9)", kind="signal", step=3, phase="", place="", final=False,
    hint="", t=1.0,
)  # fmt: skip
ABORT = c.AbortGeneration(generation=2, rank=-1)


def handshake(own_id: str, term: int, job_state: wire.Message | None) -> c.AgentHandshake:
    return c.AgentHandshake(
        node=0, id=own_id, pid=1, peer=("127.0.0.1", 1), address=("127.0.0.1", 2), domain="", generation=1,
        workers={0: c.RunningWorker(pid=2, step=3, joining=False)}, committed=2, exited={}, term=term,
        job_state=job_state,
    )  # fmt: skip


def settings_in(folder: Path, config: RuntimeConfig = CONFIG, *, node: int = 0, **more: Any) -> NodeSettings:
    return NodeSettings(
        config, node, "127.0.0.1", 0, ["train.py"], folder, folder, folder / "secret", SECRET, **more
    )  # fmt: skip


def news(port: int) -> c.JobNews:
    return c.JobNews(
        term=1, coordinator=2, candidates={1: ("127.0.0.1", port)}, members=3, master_port=1, world_size=3, nodes=3,
        moved_in=0, spares=False, servers_lost=0,
    )  # fmt: skip


def test_a_death_between_a_vote_and_the_first_word_of_the_next_coordinator_is_told_to_it(tmp_path: Path) -> None:
    """The vote says that the rank lives; it was told to nobody, and waited for until it was late."""

    async def run() -> list[str]:
        voted, died = asyncio.Event(), asyncio.Event()
        heard: asyncio.Queue[wire.Message] = asyncio.Queue()

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            writer.write(wire.encode(encode(news(next_one.sockets[0].getsockname()[1]))))
            await writer.drain()
            writer.close()

        async def take_over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET)
            vote = await wire.read(reader)
            assert vote is not None
            heard.put_nowait(vote)
            voted.set()
            await died.wait()
            writer.write(wire.encode(encode(ABORT)))
            while (message := await wire.read(reader)) is not None:
                heard.put_nowait(message)

        first = await asyncio.start_server(coordinate, "127.0.0.1", 0)
        next_one = await asyncio.start_server(take_over, "127.0.0.1", 0)
        settings = settings_in(tmp_path)
        unused: Any = None
        client = CoordinatorClient(settings, ElectionListener(SECRET, print), handshake, unused)
        await client.connect(lambda: ("127.0.0.1", first.sockets[0].getsockname()[1]), lambda: "")
        client.send_handshake()
        assert isinstance(await client.next(), c.JobNews)
        order = asyncio.create_task(client.next())
        await voted.wait()
        client.send(DEATH)
        died.set()
        assert await order == ABORT
        kinds = [str((await heard.get())["type"]) for _ in range(2)]
        await client.close()
        first.close()
        next_one.close()
        return kinds

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["handshake", "died"]


def test_a_node_that_is_busy_with_an_order_keeps_its_line(tmp_path: Path) -> None:
    """Its memory server may take longer than half of a lease; the coordinator's answers wait to be read meanwhile."""

    async def run() -> None:
        beats, ends = 0, asyncio.Event()

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal beats
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            writer.write(wire.encode(encode(news(1))))
            while await wire.read(reader) is not None:
                beats += 1
                writer.write(wire.encode(encode(c.Heard(heard=0))))
            ends.set()

        server = await asyncio.start_server(coordinate, "127.0.0.1", 0)
        settings = settings_in(tmp_path, CONFIG.model_copy(update={"restart": RestartPolicy(lease_s=1.2)}))
        unused: Any = None
        client = CoordinatorClient(settings, ElectionListener(SECRET, print), handshake, unused)
        await client.connect(lambda: ("127.0.0.1", server.sockets[0].getsockname()[1]), lambda: "")
        client.send_handshake()
        assert isinstance(await client.next(), c.JobNews)
        while beats < 8 and not ends.is_set():  # one each 0.2 s: longer than half of a lease
            await asyncio.sleep(0.01)
        assert not ends.is_set()
        await client.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("nodes", "replaced", "lease_s", "silent"),
    [
        (2, True, 0.6, False),
        (2, False, 0.6, False),
        (2, True, 600.0, False),
        (3, True, 0.6, False),
        (2, True, 600.0, True),
    ],
    ids=[
        "replaced",
        "not wanted any more",
        "at once, however long a lease is",
        "one of three, by and by",
        "not wanted and then replaced, though its connection is open",
    ],
)
def test_the_last_node_takes_over_once_it_is_told_from_outside_that_the_others_are_lost(
    tmp_path: Path, nodes: int, replaced: bool, lease_s: float, silent: bool
) -> None:
    """Of itself it may not: it cannot know whether the others go on without it."""

    async def run() -> list[str]:
        taken: list[str] = []
        led = asyncio.Event()

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            told = c.JobNews(
                term=1, coordinator=1, candidates={0: ("127.0.0.1", 9)}, members=nodes, master_port=1,
                world_size=nodes, nodes=nodes, moved_in=0, spares=False, servers_lost=0,
            )  # fmt: skip
            writer.write(wire.encode(encode(told)))
            where = {str(node): {"address": [f"10.0.0.{node + 1}", 9]} for node in range(nodes)}
            state = {"members": where, "number": 1, "term": 1}
            writer.write(wire.encode(encode(c.JobState(job_state=state, digest=""))))
            await writer.drain()
            await wire.read(reader)  # that it has it
            if silent:
                await led.wait()
            writer.close()

        class Leads:
            async def serve(self, first: Any, reading: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
                writer.write(wire.encode(encode(ABORT)))
                await led.wait()
                writer.write(wire.encode(encode(ABORT)))

        def take_over(own: c.AgentHandshake, votes: list[c.AgentHandshake], gone: frozenset[int]) -> None:
            taken.append(f"with {len(votes)} votes, without {sorted(gone)}")
            election.lead_to(Leads())

        config = RuntimeConfig(name="a", nodes=nodes, workers_per_node=1)
        config = config.model_copy(
            update={"restart": config.restart.model_copy(update={"lease_s": lease_s, "node_wait_s": 50.0})}
        )
        settings = settings_in(tmp_path, config, listen=("127.0.0.1", 0))
        first = await asyncio.start_server(coordinate, "127.0.0.1", 0)
        election = ElectionListener(SECRET, pytest.fail)
        await election.open("127.0.0.1", 0)
        client = CoordinatorClient(settings, election, handshake, take_over)
        await client.connect(lambda: ("127.0.0.1", first.sockets[0].getsockname()[1]), lambda: "")
        client.send_handshake()
        assert isinstance(await client.next(), c.JobNews)
        order = asyncio.create_task(client.next())
        done, _ = await asyncio.wait({order}, timeout=1.0)  # longer than a lease
        assert (done, taken) == (set(), [])
        client.know_gone(["10.0.0.5"], replaced=True)
        client.know_gone([f"10.0.0.{node + 1}" for node in range(2, nodes)], replaced=replaced)
        await asyncio.sleep(0)  # what waits for a majority looks again
        assert taken == []
        if silent:
            client.know_gone(["10.0.0.2"], replaced=False)
            assert client.has_coordinator
        client.know_gone(["10.0.0.2"], replaced=replaced)
        assert await order == ABORT
        client.know_gone(["10.0.0.2"], replaced=True)  # said again, it costs no connection to the next one
        led.set()
        assert await client.next() == ABORT
        await client.close()
        await election.close()
        first.close()
        return taken

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [f"with 0 votes, without {[*range(1, nodes)]}"]


def test_who_waits_for_an_order_from_outside_hears_from_its_coordinator_that_it_was_given_up(tmp_path: Path) -> None:
    """Only the connection was lost. The job waits for another agent, and this one must not wait for another job."""

    async def run() -> None:
        came = 0

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal came
            came += 1
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            word: c.ToAgent = c.StopNode(why="it was given up", hint="")
            if came == 1:
                word = c.JobNews(
                    term=1, coordinator=1, candidates={0: ("127.0.0.1", 9), 1: where}, members=2, master_port=1,
                    world_size=2, nodes=2, moved_in=0, spares=False, servers_lost=0,
                )  # fmt: skip
            writer.write(wire.encode(encode(word)))
            await writer.drain()
            writer.close()

        config = RuntimeConfig(name="a", nodes=2, workers_per_node=1)
        config = config.model_copy(update={"restart": config.restart.model_copy(update={"lease_s": 6.0})})
        settings = settings_in(tmp_path, config, listen=("127.0.0.1", 0))
        server = await asyncio.start_server(coordinate, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()[:2]
        election = ElectionListener(SECRET, pytest.fail)
        await election.open("127.0.0.1", 0)
        client = CoordinatorClient(settings, election, handshake, lambda own, votes: pytest.fail("it took over"))
        await client.connect(lambda: where, lambda: "")
        client.send_handshake()
        assert isinstance(await client.next(), c.JobNews)
        with pytest.raises(ExcludedError, match="node 0 stops: it was given up"):
            await client.next()
        await client.close()
        await election.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


class Others:
    """Other agents of a job of one node, which is the client's: each a server that answers as it is told."""

    def __init__(self, tmp_path: Path) -> None:
        config = RuntimeConfig(name="a", nodes=9, workers_per_node=1)
        config = config.model_copy(update={"restart": config.restart.model_copy(update={"lease_s": 6.0})})
        self._folder, self._config = tmp_path, config
        self.heard: list[int] = []
        self._servers: list[asyncio.Server] = []
        self.where: dict[int, tuple[str, int]] = {}

    async def listen(self, node: int, *words: c.ToAgent | None) -> None:
        """`words`: first word to who comes first, second, ...; None hangs up. Without any, nobody is answered."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not words:
                await reader.read()
                return
            await wire.accept_peer(reader, writer, SECRET)
            if await wire.read(reader) is not None:
                self.heard.append(node)
                if (word := words[min(self.heard.count(node), len(words)) - 1]) is not None:
                    writer.write(wire.encode(encode(word)))
                    await writer.drain()
                    if not isinstance(word, c.JobNews):
                        await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        self._servers.append(server)
        self.where[node] = server.sockets[0].getsockname()[:2]

    def news(self, coordinator: int, term: int = 1) -> c.JobNews:
        return c.JobNews(
            term=term, coordinator=coordinator, candidates=self.where, members=9, master_port=1, world_size=9, nodes=9,
            moved_in=0, spares=False, servers_lost=0,
        )  # fmt: skip

    async def client(self, me: int) -> CoordinatorClient:
        """Of an agent whose coordinator, node 8, was silent for too long."""
        settings = settings_in(self._folder, self._config, node=me)
        self.election = ElectionListener(SECRET, pytest.fail)
        await self.election.open("127.0.0.1", 0)
        unused: Any = None
        client = CoordinatorClient(settings, self.election, handshake, unused)
        client.news, client.given_up = self.news(8), True
        return client

    async def close(self) -> None:
        await self.election.close()
        for server in self._servers:
            server.close()


def test_a_rack_of_candidates_that_do_not_answer_costs_the_time_of_one(tmp_path: Path) -> None:
    """One after the other they would take longer than a node may look, and it would stop."""

    async def run() -> None:
        others = Others(tmp_path)
        for node in range(7):
            await others.listen(node)
        await others.listen(7, ABORT)
        client = await others.client(me=9)
        assert await client.next() == ABORT
        await client.close()
        await others.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_is_voted_for_finds_that_the_coordinator_is_back_and_says_so_to_those_who_wait(tmp_path: Path) -> None:
    """It stood still for a moment, in which not enough of them looked for another."""

    async def run() -> None:
        others = Others(tmp_path)
        await others.listen(8, None)
        client = await others.client(me=0)
        others.where[0] = others.election.address
        await others.listen(8, others.news(8))  # it is there again, and has not lost its number
        client.news = others.news(8)
        client.job_state = {"members": {str(node): {} for node in range(9)}, "number": 1, "term": 1}
        reader, writer = await asyncio.open_connection(*others.election.address)
        await wire.join_peer(reader, writer, SECRET)
        vote = handshake("5", 1, None).model_copy(update={"node": 5, "term": 1, "generation": 1, "job_state": None})
        writer.write(wire.encode(with_version(encode(vote))))
        word = await client.next()
        assert isinstance(word, c.JobNews)
        told = await wire.read(reader)
        assert told is not None
        found = c.AGENT_ORDERS.decode(told)
        assert isinstance(found, c.JobNews)
        assert (found.coordinator, found.term) == (8, 1)
        assert await wire.read(reader) is None
        await client.close()
        await others.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("term", [1, 2])
def test_who_is_told_where_the_coordinator_is_goes_there(tmp_path: Path, term: int) -> None:
    async def run() -> list[int]:
        others = Others(tmp_path)
        await others.listen(8, ABORT)
        await others.listen(7, ABORT)
        there = {1: 8, 2: 7}[term]
        where = dict(others.where)
        await others.listen(2, others.news(there, term).model_copy(update={"candidates": where}))
        client = await others.client(me=9)
        client.news = others.news(8).model_copy(update={"candidates": {2: others.where[2], 8: others.where[8]}})
        assert await client.next() == ABORT
        await client.close()
        await others.close()
        return others.heard

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [2, {1: 8, 2: 7}[term]]


def test_who_lost_the_one_it_voted_for_without_a_word_does_not_go_back(tmp_path: Path) -> None:
    """Its vote may be counted there: with its vote, two coordinators might go on."""

    async def run() -> list[int]:
        others = Others(tmp_path)
        await others.listen(8, ABORT)
        client = await others.client(me=9)
        await others.listen(7, ABORT)
        await others.listen(2, None, others.news(8), others.news(7, 2))
        client.news = others.news(8)
        assert await client.next() == ABORT
        await client.close()
        await others.close()
        return others.heard

    heard = asyncio.run(asyncio.wait_for(run(), 60))
    assert 8 not in heard


def test_a_coordinator_that_takes_a_node_no_more_does_not_end_its_search(tmp_path: Path) -> None:
    async def run() -> list[int]:
        others = Others(tmp_path)
        await others.listen(8, c.StopNode(why="the coordinator has stepped down", hint=""))
        await others.listen(7, ABORT)
        client = await others.client(me=9)
        await others.listen(2, others.news(8), others.news(7, 2))
        client.news = others.news(8)
        assert await client.next() == ABORT
        await client.close()
        await others.close()
        return others.heard

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [2, 8, 2, 7]


def test_who_asks_its_former_coordinator_and_hears_of_another_goes_there(tmp_path: Path) -> None:
    """The word of one that coordinates no more is no order."""

    async def run() -> list[int]:
        others = Others(tmp_path)
        await others.listen(7, ABORT)
        await others.listen(8, others.news(7, 2))
        client = await others.client(me=0)
        others.where[0] = others.election.address
        client.news = others.news(8)
        client.job_state = {"members": {str(node): {} for node in range(9)}, "number": 1, "term": 1}
        assert await client.next() == ABORT
        await client.close()
        await others.close()
        return others.heard

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [8, 7]


def test_what_is_said_to_a_coordinator_that_is_gone_is_no_noise_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent may have much to say before it reads that the connection has ended."""

    async def run() -> None:
        gone = asyncio.Event()

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            writer.transport.abort()
            gone.set()

        server = await asyncio.start_server(coordinate, "127.0.0.1", 0)
        unused: Any = None
        client = CoordinatorClient(settings_in(tmp_path), ElectionListener(SECRET, print), handshake, unused)
        await client.connect(lambda: ("127.0.0.1", server.sockets[0].getsockname()[1]), lambda: "")
        client.send_handshake()
        await gone.wait()
        for _ in range(40):
            client.send(DEATH)
            await asyncio.sleep(0)
        await client.close()
        server.close()

    asyncio.run(run())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_node_that_comes_as_the_job_has_ended_is_told_so(tmp_path: Path) -> None:
    """It was given a place, and the coordinator was gone before it was there: the operator was asked to restart a job
    that had succeeded."""

    async def run() -> c.ToAgent | None:
        ended = ElectionListener(SECRET, pytest.fail, succeeded=True)
        await ended.open("127.0.0.1", 0)

        async def be_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        places = [ended.address]
        coordinator = await asyncio.start_server(be_gone, "127.0.0.1", 0)
        places.insert(0, coordinator.sockets[0].getsockname())
        unused: Any = None
        client = CoordinatorClient(settings_in(tmp_path), ElectionListener(SECRET, print), handshake, unused)
        await client.connect(lambda: places.pop(0) if len(places) > 1 else places[0], lambda: "")
        client.send_handshake()
        word = await client.next()
        await client.close()
        await ended.close()
        coordinator.close()
        return word

    order = asyncio.run(asyncio.wait_for(run(), 60))
    assert isinstance(order, c.EndJob)
    assert order.state == "succeeded"


def test_a_node_of_another_job_says_so_at_once_and_one_damaged_handshake_is_tried_again(tmp_path: Path) -> None:
    """Its own time to join is 600 s."""

    async def run() -> None:
        came: list[None] = []

        async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(None)
            if len(came) == 1:
                writer.write(b"\xff" * 8)
                writer.close()
                return
            with contextlib.suppress(wire.WireError):
                await wire.accept_peer(reader, writer, SECRET)

        server = await asyncio.start_server(admit, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()[:2]
        unused: Any = None
        for secret in (SECRET, b"another job's"):
            settings = dataclasses.replace(settings_in(tmp_path), secret=secret)
            client = CoordinatorClient(settings, ElectionListener(secret, print), handshake, unused)
            if secret is SECRET:
                await client.connect(lambda: where, lambda: "")
            else:
                with pytest.raises(
                    JobFailedError, match=r"cannot join the job of the coordinator at .* another job's secret"
                ):
                    await client.connect(lambda: where, lambda: "")
            await client.close()
        assert len(came) == 5
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))
