"""Messages between our processes. A message is a 4-byte big-endian length, followed by a JSON object. Messages never
contain pickled data.

On a Unix socket, the kernel reports the user id of the peer's process, which must be the user id of this process. On
TCP, both sides prove that they have the job's secret before any other message is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.ipc import fast_json, tls
from hyperpod_ext.runtime.ipc.connections import Connection as Connection
from hyperpod_ext.runtime.ipc.connections import breaking, open_tcp

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class WireError(ConnectionError):
    """The peer violated the protocol, or could not prove that it has the job's secret."""


class RefusedError(WireError):
    """The two sides of a connection belong to different jobs or differ in their TLS settings; a retry would fail."""


class TooLongError(JobFailedError):
    """A message is longer than `MAX_FRAME_BYTES`. No part of the message was sent, so the connection can still be used.
    Sending the message again would fail in the same way."""


class BusyError(ConnectionError):
    """A server closed the connection during the handshake, or did not answer in time. A retry may succeed."""


def encode(message: Message) -> bytes:
    """Return a message as a frame: the 4-byte length, followed by the JSON text.

    Raises:
        TooLongError: the message is longer than `MAX_FRAME_BYTES`.
    """
    body = fast_json.dump(message)
    if len(body) > MAX_FRAME_BYTES:
        kind = next((str(message[key]) for key in ("op", "type", "event") if key in message), "of unknown kind")
        raise TooLongError(
            f"a message `{kind}` of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}",
            hint="Keep large data in tensors: they are not part of messages.",
        )
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message that the JSON text `body` of a frame contains.

    Raises:
        WireError: the body is not a JSON object.
    """
    try:
        message = fast_json.load(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a frame is not a JSON object")
    return message


def body_length(header: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the length of the JSON text that follows the 4-byte `header` of a frame.

    Raises:
        WireError: the length is greater than `limit`.
    """
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
    if length > limit:
        raise WireError(f"a frame announces {length} bytes; for this peer, the limit is now {limit}")
    return length


def frames(received: bytearray, limit: int = MAX_FRAME_BYTES) -> Iterator[Message]:
    """Yield the message of each complete frame in `received`, and remove the frame's bytes."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + body_length(bytes(received[: _LENGTH.size]), limit)
        if len(received) < end:
            return
        message = decode(bytes(received[_LENGTH.size : end]))
        del received[:end]
        yield message


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one message. `fds`: file descriptors to send with the message, on a Unix socket only."""
    frame = encode(message)
    with breaking():
        sent = socket.send_fds(sock, [frame], fds) if fds else 0
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Return the next message; None if the peer closed the connection between two frames."""
    message, _ = receive_fds(sock, 0, limit)
    return message


def receive_fds(sock: socket.socket, max_fds: int, limit: int = MAX_FRAME_BYTES) -> tuple[Message | None, list[int]]:
    """Return the next message and the file descriptors received with it. The returned message is None if the peer
    closed the connection between two frames."""
    header, fds = b"", []
    while len(header) < _LENGTH.size:
        with breaking():
            if max_fds:
                data, new_fds, _flags, _address = socket.recv_fds(sock, _LENGTH.size - len(header), max_fds)
                fds += new_fds
            else:
                data = sock.recv(_LENGTH.size - len(header))
        if not data:
            if header:
                raise WireError("the peer closed in the middle of a frame")
            return None, fds
        header += data
    body = bytearray(body_length(header, limit))
    receive_into(sock, memoryview(body))
    return decode(bytes(body)), fds


def receive_into(sock: socket.socket, destination: memoryview) -> None:
    """Receive bytes until `destination` is full."""
    filled = 0
    while filled < len(destination):
        with breaking():
            count = sock.recv_into(destination[filled:])
        if count == 0:
            raise WireError("the peer closed in the middle of a frame")
        filled += count


async def read(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Return the next message of an asyncio stream; None if the peer closed the connection between two frames."""
    try:
        header = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise WireError("the peer closed in the middle of a frame") from error
        return None
    length = body_length(header, limit)
    try:
        return decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise WireError("the peer closed in the middle of a frame") from error


# --- authentication -----------------------------------------------------------------------------


def check_same_user(sock: socket.socket) -> int:
    """Check that the peer of a Unix socket is a process of this user, and return its process id.

    Raises:
        WireError: the peer is a process of another user.
    """
    with breaking():
        pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise WireError(f"a process of user {uid} connected; this socket is for user {os.getuid()}")
    return int(pid)


_TRIES = 5
_BUSY_S = 0.05
"""Number of seconds before a retry of `again_while_busy`. A server that has too many connections from unknown clients
also closes the connections of the job's own processes, if they have not sent their proof yet."""
Connected = TypeVar("Connected")


def again_while_busy(connect: Callable[[], Connected]) -> Connected:
    """Return the result of `connect()`, which is called up to `_TRIES` times while it raises BusyError.

    Raises:
        OSError: `connect` has raised another error, or BusyError in the last attempt.
    """
    for _ in range(_TRIES - 1):
        try:
            return connect()
        except BusyError:
            time.sleep(_BUSY_S)
    return connect()


HANDSHAKE_S = 10.0
"""Maximum number of seconds from accepting a connection to the peer's proof that it has the job's secret."""
REFUSED: Message = {"refused": True}
"""A server's answer to a client that does not have the job's secret. A server with too many unauthenticated connections
sends no answer and closes the connection."""
_NOT_SHOWN = "a peer has not proved within {:g} s that it has the job's secret"
_HANDSHAKE_BYTES = 1024  # maximum size of a frame from a peer that is not authenticated yet


def _equal(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="replace"), expected.encode())


def _proof(secret: bytes, role: str, first: str, second: str) -> str:
    return hmac.new(secret, f"{role}:{first}:{second}".encode(errors="replace"), hashlib.sha256).hexdigest()


def admit(secret: bytes, ours: str, answer: Message | None) -> Message:
    """Check the proof with which a client has answered the server's nonce `ours`, and return the message with the
    server's own proof.

    Raises:
        WireError: the client does not have the job's secret.
    """
    if answer is None:
        raise WireError("a peer closed the connection before it had proved that it has the job's secret")
    theirs = str(answer.get("nonce"))
    if not _equal(answer.get("proof"), _proof(secret, "client", ours, theirs)):
        raise WireError("a peer without the job's secret was refused")
    return {"proof": _proof(secret, "server", theirs, ours)}


async def accept_peer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, encrypted: bool = False
) -> None:
    """Run the server's side of the authentication handshake on an asyncio stream, with TLS if `encrypted`.

    Raises:
        WireError: the peer has not proved within the time limit that it has the job's secret.
    """
    ours = secrets.token_hex(16)
    writer.write(encode(_challenge(ours, encrypted)))
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            if encrypted:
                await _start_tls(writer, tls.own_certificate().context)
                secret = tls.bound(secret, tls.own_certificate().bytes)
            answer = await read(reader, _HANDSHAKE_BYTES)
    except TimeoutError as error:
        if not encrypted:
            # make the client retry, because this process may have been too busy to read its answer in time
            writer.write(encode({"busy": True}))
        raise WireError(_NOT_SHOWN.format(HANDSHAKE_S)) from error
    try:
        proof = admit(secret, ours, answer)
    except WireError:
        writer.write(encode(REFUSED))
        raise
    writer.write(encode(proof))


async def _start_tls(writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
    try:
        await writer.start_tls(context)
    except OSError as error:
        raise WireError(f"a TLS handshake has failed: {error}") from error
    if writer.transport is None:  # the connection was closed during the TLS handshake
        raise WireError("a TLS handshake was cut off")


def _challenge(nonce: str, encrypted: bool) -> Message:
    return {"nonce": nonce, "tls": True} if encrypted else {"nonce": nonce}


def accept_peer_blocking(sock: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_S) -> None:
    """Run the server's side of the authentication handshake on a blocking socket, with TLS if `sock` is an
    `ssl.SSLSocket`.

    Raises:
        WireError: the peer has not proved within `timeout_s` that it has the job's secret.
    """
    ours = secrets.token_hex(16)
    try:
        with breaking(), _Handshake(sock, timeout_s) as handshake:
            if isinstance(sock, ssl.SSLSocket):
                handshake.start_tls(sock, encode(_challenge(ours, encrypted=True)))
                secret = tls.bound(secret, tls.own_certificate().bytes)
            else:
                handshake.send(_challenge(ours, encrypted=False))
            answer = handshake.receive()
            try:
                proof = admit(secret, ours, answer)
            except WireError:
                handshake.send(REFUSED)
                raise
            handshake.send(proof)
    except TimeoutError as error:
        raise WireError(_NOT_SHOWN.format(timeout_s)) from error


async def dial(host: str, port: int, secret: bytes, *, encrypted: bool = False) -> Connection:
    """Connect to another agent of the job, and authenticate. The caller must set a time limit.

    Raises:
        OSError: no agent listens at the address.
        BusyError, WireError: see `join_peer`.
    """
    reader, writer = await open_tcp(host, port)
    try:
        await join_peer(reader, writer, secret, encrypted=encrypted)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def join_peer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, encrypted: bool = False
) -> None:
    """Run the client's side of the authentication handshake on an asyncio stream, with TLS if `encrypted`.

    Raises:
        BusyError: the server closed the connection without an answer, or is too busy. A retry may succeed.
        WireError: the server does not have the job's secret, or has refused this process's proof.
    """
    ours = secrets.token_hex(16)
    challenge = await _answered(reader)
    _check_same(challenge, encrypted)
    if encrypted:
        await _start_tls(writer, tls.client_context())
        secret = tls.bound(secret, writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    writer.write(encode(_answer(secret, ours, challenge)))
    answer = await _answered(reader)
    _check_server(secret, ours, challenge, answer)


async def _answered(reader: asyncio.StreamReader) -> Message:
    answer = await read(reader, _HANDSHAKE_BYTES)
    if answer is None or answer.get("busy") is True:
        raise BusyError("the server has closed the connection before it had answered: it may be busy")
    return answer


def _check_same(challenge: Message, encrypted: bool) -> None:
    """Check that the server uses TLS if `encrypted`, and does not use TLS otherwise. A client that requires TLS must
    never continue without TLS.

    Raises:
        RefusedError: only one of the two sides uses TLS.
    """
    if (challenge.get("tls") is True) != encrypted:
        has = "requires TLS, but this process has none" if not encrypted else "has no TLS, but this process requires it"
        raise RefusedError(f"the server {has}: network.tls must be the same on all nodes")


def join_peer_blocking(
    sock: socket.socket, secret: bytes, timeout_s: float = 3 * HANDSHAKE_S, *, encrypted: bool = False
) -> socket.socket:
    """Run the client's side of the authentication handshake on a blocking socket, with TLS if `encrypted`.

    Returns the socket to use afterwards: `sock`, or a new TLS socket if `encrypted`.

    Raises:
        BusyError: the server has closed the connection without an answer, because it is shutting down or has too many
            connections.
        WireError: the server belongs to another job, or has not answered within `timeout_s`.
    """
    ours = secrets.token_hex(16)
    try:
        with breaking(), _Handshake(sock, timeout_s) as handshake:
            challenge = handshake.answered("before the handshake")
            _check_same(challenge, encrypted)
            if encrypted:
                sock = handshake.wrap()
                secret = tls.bound(secret, sock.getpeercert(binary_form=True))
            handshake.send(_answer(secret, ours, challenge))
            answer = handshake.answered("after our proof")
    except (WireError, BusyError):
        raise
    except ConnectionError as error:  # callers retry after a BusyError
        raise BusyError(_HUNG_UP.format("in the handshake")) from error
    except TimeoutError as error:
        raise WireError(f"the server has not finished the handshake within {timeout_s:g} s") from error
    _check_server(secret, ours, challenge, answer)
    return sock


_HUNG_UP = "the server closed the connection {}: it is shutting down, or has too many connections"


class _Handshake:
    """Sends and receives the messages of one authentication handshake on a blocking socket. A single deadline applies
    to all messages of the handshake together."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock, self._before = sock, sock.gettimeout()
        self._deadline = time.monotonic() + timeout_s

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.settimeout(self._before)

    def send(self, message: Message) -> None:
        self._set_timeout()
        self._sock.sendall(encode(message))

    def start_tls(self, sock: ssl.SSLSocket, challenge: bytes) -> None:
        """Send the challenge without encryption, then run the server's side of the TLS handshake."""
        self._set_timeout()
        socket.socket.sendall(sock, challenge)
        self._set_timeout()
        sock.do_handshake()

    def wrap(self) -> ssl.SSLSocket:
        """Run the client's side of the TLS handshake, and return the TLS socket."""
        self._set_timeout()
        self._sock = wrapped = tls.client_context().wrap_socket(self._sock)
        return wrapped

    def receive(self) -> Message | None:
        """Return the next message; None if the peer closed the connection between two frames."""
        if not (header := self._receive(_LENGTH.size)):
            return None
        length = body_length(header, _HANDSHAKE_BYTES)
        body = self._receive(length)
        if len(body) < length:
            raise WireError("the peer closed in the middle of a frame")
        return decode(body)

    def answered(self, where: str) -> Message:
        if (message := self.receive()) is None:
            raise BusyError(_HUNG_UP.format(where))
        return message

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._set_timeout()
            more = self._sock.recv(count - len(data))
            if not more:
                if data:
                    raise WireError("the peer closed in the middle of a frame")
                break
            data += more
        return data

    def _set_timeout(self) -> None:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


def _answer(secret: bytes, ours: str, challenge: Message) -> Message:
    return {"nonce": ours, "proof": _proof(secret, "client", str(challenge.get("nonce")), ours)}


def _check_server(secret: bytes, ours: str, challenge: Message, answer: Message) -> None:
    if answer.get("refused") is True:
        raise RefusedError("the server refused our proof: it has another job's secret")
    expected = _proof(secret, "server", ours, str(challenge.get("nonce")))
    if not _equal(answer.get("proof"), expected):
        raise RefusedError("the server does not have the job's secret; this is not our job's endpoint")
