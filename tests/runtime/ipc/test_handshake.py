"""A secret that is wrong is told apart from a server that is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.listener import Listener

SECRET = b"the secret of this test's job"
Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def reach(answers: Answers, secret: bytes = SECRET) -> None:
    listener = Listener(answers, pytest.fail)
    reader, writer = await asyncio.open_connection("127.0.0.1", await listener.listen_tcp("127.0.0.1", 0))
    try:
        async with asyncio.timeout(30):
            await wire.join_peer(reader, writer, secret)
    finally:
        writer.close()
        await listener.close()


async def is_ours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await wire.accept_peer(reader, writer, SECRET)


async def has_no_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode({"nonce": "a"}))
    writer.write(wire.encode({"busy": True}))


async def ends_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode({"nonce": "a"}))


async def is_anothers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode({"nonce": "a"}))
    writer.write(wire.encode({"proof": "b"}))


def test_who_has_the_secret_is_let_in() -> None:
    asyncio.run(reach(is_ours))


def test_a_wrong_secret_is_refused_in_words() -> None:
    with pytest.raises(wire.WireError, match="proof: it has another job's secret"):
        asyncio.run(reach(is_ours, b"the secret of another job"))


def test_a_server_without_the_secret_is_refused() -> None:
    with pytest.raises(wire.WireError, match="not our job"):
        asyncio.run(reach(is_anothers))


@pytest.mark.parametrize("answers", [has_no_time, ends_at_once])
def test_a_server_that_is_busy_is_asked_again(answers: Answers) -> None:
    with pytest.raises(wire.BusyError):
        asyncio.run(reach(answers))
    assert not issubclass(wire.BusyError, wire.WireError), "which would be final"
