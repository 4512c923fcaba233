"""An agent's line to its memory server: one that ends while it is asked is followed by another, or it says why not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient, MemoryLostError
from hyperpod_ext.runtime.memory_server.protocol import requests as r

Answer = Callable[[wire.Message], wire.Message | None]


async def serve(path: Path, answer: Answer) -> asyncio.Server:
    """A memory server that hangs up where it has no answer."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (request := await wire.read(reader)) is not None and (said := answer(request)) is not None:
            writer.write(wire.encode(said))
        writer.close()

    return await asyncio.start_unix_server(converse, path)


def test_what_is_asked_of_a_server_that_ends_is_asked_of_the_next_which_knows_what_the_first_was_told(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        line, heard, broken_off = AsyncMemoryClient(tmp_path / "memory"), list[wire.Message](), asyncio.Event()

        def answer_all_but_one(request: wire.Message) -> wire.Message | None:
            if request["op"] != "status":
                return {"port": 1} if request["op"] == "listen" else {}
            broken_off.set()
            return None

        first = await serve(tmp_path / "memory", answer_all_but_one)
        for generation in (1, 2):
            await line.ask(r.Fence(generation=generation))
        await line.ask(r.Fence(generation=2, step=7))
        await line.ask(r.Listen(host="here"))
        asked = asyncio.create_task(line.ask(r.Status()))
        await broken_off.wait()
        first.close()

        def answer(request: wire.Message) -> wire.Message:
            heard.append(request)
            answers = {"listen": {"port": 2}, "held": {"snapshots": []}, "status": {"snapshots": [], "copying": []}}
            return answers.get(request["op"], {})

        second = await serve(tmp_path / "next", answer)
        line.lost()
        answers = await line.succeed(tmp_path / "next")
        assert r.PeerPort(port=2) in answers
        assert await asked == r.ServerStatus(snapshots=(), copying=())
        assert [(its["op"], its.get("generation"), its.get("step")) for its in heard] == [
            ("fence", 2, None),
            ("fence", 2, 7),
            ("listen", None, None),
            ("held", None, None),
            ("status", None, None),
        ]
        second.close()

    asyncio.run(scene())


def test_where_no_other_follows_whoever_asks_is_told_why(tmp_path: Path) -> None:
    async def scene() -> None:
        line = AsyncMemoryClient(tmp_path / "memory")
        line.lost("killed by SIGKILL (9)")
        with pytest.raises(JobFailedError, match=r"memory server of this node has ended: killed by SIGKILL \(9\)"):
            await line.ask(r.Held())

    asyncio.run(scene())


def test_a_next_server_that_ends_before_it_knows_everything_is_no_server(tmp_path: Path) -> None:
    async def scene() -> Any:
        line = AsyncMemoryClient(tmp_path / "memory")
        server = await serve(tmp_path / "next", lambda request: None)
        answers = await line.succeed(tmp_path / "next")
        server.close()
        return answers

    assert asyncio.run(scene()) == []
    assert not (tmp_path / "memory").exists()


def test_a_server_that_does_not_answer_is_named_and_the_next_one_is_asked(tmp_path: Path) -> None:
    """It is stopped, say. Nobody but the client can know: its process lives, and takes connections."""

    async def scene() -> list[str]:
        said: list[str] = []
        stopped = asyncio.Event()

        async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await stopped.wait()

        def silent(why: str) -> None:
            said.append(why)
            line.lost()

        line = AsyncMemoryClient(tmp_path / "memory", limit_s=0.2)
        line.on_silent = silent
        first = await asyncio.start_unix_server(keep_silent, tmp_path / "memory")
        watching = asyncio.create_task(line.watch())
        asked = [asyncio.create_task(line.ask(r.Held(owner=owner))) for owner in (None, 3)]
        while not said:
            await asyncio.sleep(0.01)
        held = {"snapshots": [], "pieces": []}
        second = await serve(
            tmp_path / "next", lambda request: held if request["op"] == "held" else {"pid": 1, "config": {}}
        )
        assert await line.succeed(tmp_path / "next")
        assert await asyncio.gather(*asked) == [r.Snapshots(snapshots=(), pieces=())] * 2
        watching.cancel()
        stopped.set()
        first.close()
        second.close()
        return said

    (why, *_) = asyncio.run(asyncio.wait_for(scene(), 60))
    assert why.endswith("for 0.2 s")


def test_a_request_whose_connection_breaks_is_sent_again(tmp_path: Path) -> None:
    async def scene() -> None:
        came: list[str] = []

        def answer(request: wire.Message) -> wire.Message | None:
            came.append(request["op"])
            return None if len(came) < 3 else {"snapshots": [], "copying": []}

        server = await serve(tmp_path / "memory", answer)
        assert await AsyncMemoryClient(tmp_path / "memory").ask(r.Status()) == r.ServerStatus(snapshots=(), copying=())
        assert came == ["status"] * 3
        server.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_worker_leaves_a_server_that_keeps_its_connection_once_another_has_its_place(tmp_path: Path) -> None:
    """One that waits for a disk is not ended by SIGKILL, and its connections stay open."""
    path = str(tmp_path / "memory")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(path)
        first.listen()
        client = MemoryClient(path, another=True)
        second.bind(f"{path}.next")
        second.listen()
        Path(f"{path}.next").rename(path)
        with pytest.raises(MemoryLostError):
            client.ask(r.Held())
        client.connect()
        second.accept()[0].close()
        client.close()
