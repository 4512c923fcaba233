"""TLS between processes of a job: who is in between reads nothing, and cannot pass for either side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc import tls
from hyperpod_ext.runtime.ipc.listener import Listener

SECRET = b"0123456789abcdef0123456789abcdef"
WORD = "weights of the model"
Address = tuple[str, int]


def encrypting(sock: socket.socket) -> ssl.SSLSocket:
    return tls.own_certificate().context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[Address]:
    """A server of one connection; what it raises is the test's business where that asks for it."""

    def work() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(20)
            with connection:
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work)
        thread.start()
        yield listener.getsockname()
    thread.join()


def echo(connection: socket.socket) -> None:
    """An honest server with TLS."""
    with encrypting(connection) as sock:
        wire.accept_peer_blocking(sock, SECRET)
        wire.send(sock, wire.receive(sock) or {})


def ask(address: Address, *, encrypted: bool = True, secret: bytes = SECRET) -> wire.Message | None:
    sock = socket.create_connection(address, timeout=20)
    with wire.join_peer_blocking(sock, secret, encrypted=encrypted) as line:
        wire.send(line, {"word": WORD})
        return wire.receive(line)


def test_both_sides_speak_tls_1_3() -> None:
    with serving(echo) as address:
        sock = socket.create_connection(address, timeout=20)
        with wire.join_peer_blocking(sock, SECRET, encrypted=True) as line:
            assert isinstance(line, ssl.SSLSocket)
            assert line.version() == "TLSv1.3"
            wire.send(line, {"word": WORD})
            assert wire.receive(line) == {"word": WORD}


def test_who_is_in_between_reads_nothing() -> None:
    seen = bytearray()

    def pass_on(connection: socket.socket) -> None:
        with socket.create_connection(server, timeout=20) as onward:
            back = threading.Thread(target=pump, args=(onward, connection))
            back.start()
            pump(connection, onward)
            back.join()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with serving(echo) as server, serving(pass_on) as between:
        assert ask(between) == {"word": WORD}
    assert b"nonce" in seen
    assert WORD.encode() not in seen
    assert b"proof" not in seen


def test_who_is_in_between_cannot_hand_on_proofs() -> None:
    """It ends TLS on both sides with a certificate of its own, and hands on each frame."""
    handed_on: list[wire.Message] = []

    def relay(connection: socket.socket) -> None:
        onward = socket.create_connection(server, timeout=20)
        challenge = wire.receive(onward)
        assert challenge is not None
        wire.send(connection, challenge)
        context = tls.OwnCertificate().context
        client = context.wrap_socket(connection, server_side=True)
        with client, tls.client_context().wrap_socket(onward) as theirs:
            proof = wire.receive(client)
            assert proof is not None
            wire.send(theirs, proof)
            answer = wire.receive(theirs)
            assert answer is not None
            handed_on.append(answer)
            wire.send(client, answer)

    with (
        serving(echo) as server,
        serving(relay) as between,
        pytest.raises(wire.WireError, match=r"refused our proof"),
    ):
        ask(between)
    assert handed_on == [{"refused": True}]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_client_never_goes_on_with_less_than_it_was_told(encrypted: bool) -> None:
    def serve(connection: socket.socket) -> None:
        wire.accept_peer_blocking(connection if encrypted else encrypting(connection), SECRET)

    with serving(serve) as address, pytest.raises(wire.WireError, match=r"network\.tls must be the same"):
        ask(address, encrypted=encrypted)


def test_another_secret_is_refused_in_words() -> None:
    with serving(echo) as address, pytest.raises(wire.WireError, match="another job's secret"):
        ask(address, secret=b"another secret of 32 bytes, or so")


def test_agents_speak_tls_on_streams() -> None:
    async def talk() -> wire.Message | None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET, encrypted=True)
            for _ in range(2):
                writer.write(wire.encode(await wire.read(reader) or {}))

        listener = Listener(serve, pytest.fail)
        reader, writer = await asyncio.open_connection("127.0.0.1", await listener.listen_tcp("127.0.0.1", 0))
        async with asyncio.timeout(30):
            await wire.join_peer(reader, writer, SECRET, encrypted=True)
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            large = {"word": WORD * 100_000}  # more than a stream holds before it asks its sender to wait
            for message in (large, {"word": WORD}):
                writer.write(wire.encode(message))
                answer = await wire.read(reader)
        writer.close()
        await listener.close()
        return answer

    assert asyncio.run(talk()) == {"word": WORD}


@pytest.mark.parametrize("says", [b"", b"\x00" * 400, b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_who_speaks_no_tls_ends_its_own_connection_only(says: bytes) -> None:
    """Anything but a ConnectionError would count as an error of the coordinator."""

    async def come() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await wire.accept_peer(reader, writer, SECRET, encrypted=True)

        wrong: list[str] = []
        listener = Listener(serve, wrong.append)
        port = await listener.listen_tcp("127.0.0.1", 0)
        for closes in (True, False):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await wire.read(reader) is not None
            writer.write(says)
            await writer.drain()
            if closes:
                writer.close()
        await asyncio.sleep(0)
        await listener.close()
        assert wrong == []

    asyncio.run(come())


def test_one_field_turns_it_on() -> None:
    config = {"name": "j", "nodes": 2, "workers_per_node": 1}
    assert not RuntimeConfig.model_validate(config).encrypted
    assert not RuntimeConfig.model_validate(config | {"network": {"interface": "ens5"}}).encrypted
    on = RuntimeConfig.model_validate(config | {"network": {"tls": True}})
    assert (on.encrypted, on.interface) == (True, "")
