"""What an agent says to the coordinator, and to the node that is about to become it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient, ExcludedError
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode

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
        settings = NodeSettings(
            CONFIG, 0, "127.0.0.1", 0, ["train.py"], tmp_path, tmp_path, tmp_path / "secret", SECRET
        )
        unused: Any = None
        client = CoordinatorClient(settings, unused, handshake, unused)
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


@pytest.mark.parametrize(
    ("replaced", "lease_s"),
    [(True, 0.6), (False, 0.6), (True, 600.0)],
    ids=["replaced", "not wanted any more", "at once, however long a lease is"],
)
def test_one_of_two_takes_over_once_it_is_told_from_outside_that_the_other_is_lost(
    tmp_path: Path, replaced: bool, lease_s: float
) -> None:
    """Of itself it may not: it cannot know whether the other goes on without it."""

    async def run() -> list[str]:
        taken: list[str] = []
        led = asyncio.Event()

        async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET)
            await wire.read(reader)
            told = c.JobNews(
                term=1, coordinator=1, candidates={0: ("127.0.0.1", 9)}, members=2, master_port=1, world_size=2,
                nodes=2, moved_in=0, spares=False, servers_lost=0,
            )  # fmt: skip
            writer.write(wire.encode(encode(told)))
            where = {"0": {"address": ["10.0.0.1", 9]}, "1": {"address": ["10.0.0.2", 9]}}
            state = {"members": where, "number": 1, "term": 1}
            writer.write(wire.encode(encode(c.JobState(job_state=state, digest=""))))
            await writer.drain()
            await wire.read(reader)  # that it has it
            writer.close()

        class Leads:
            async def serve(self, first: Any, reading: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
                writer.write(wire.encode(encode(ABORT)))
                await led.wait()

        def take_over(own: c.AgentHandshake, votes: list[c.AgentHandshake], gone: frozenset[int]) -> None:
            taken.append(f"with {len(votes)} votes, without {sorted(gone)}")
            election.lead_to(Leads())

        config = RuntimeConfig(name="a", nodes=2, workers_per_node=1)
        config = config.model_copy(
            update={"restart": config.restart.model_copy(update={"lease_s": lease_s, "node_wait_s": 50.0})}
        )
        settings = NodeSettings(
            config, 0, "127.0.0.1", 0, ["train.py"], tmp_path, tmp_path, tmp_path / "secret", SECRET,
            listen=("127.0.0.1", 0),
        )  # fmt: skip
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
        assert taken == []
        client.know_gone(["10.0.0.2"], replaced=replaced)
        assert await order == ABORT
        led.set()
        await client.close()
        await election.close()
        first.close()
        return taken

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["with 0 votes, without [1]"]


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
        settings = NodeSettings(
            config, 0, "127.0.0.1", 0, ["train.py"], tmp_path, tmp_path, tmp_path / "secret", SECRET,
            listen=("127.0.0.1", 0),
        )  # fmt: skip
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
