"""Messages between our processes. A message is a 4-byte big-endian length, followed by JSON. No message is pickled.

On a Unix socket, the kernel reports the peer's user id, which must be ours. On TCP, both sides prove that they have the
job's secret before any other message is read.
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
    """The peer broke the protocol, or failed to prove its identity."""


class RefusedError(WireError):
    """The two sides belong to different jobs or have different settings. A retry does not help."""


class TooLongError(JobFailedError):
    """A message is longer than allowed. No part of the message was sent, so the connection is unchanged. A retry does
    not help."""


class BusyError(ConnectionError):
    """A server has not answered in time. A retry may help."""


def encode(message: Message) -> bytes:
    """Return the frame of a message: its length and its JSON.

    Raises:
        TooLongError: the message is longer than allowed.
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
    """Return the message in a frame's body.

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
    """Return the length of the body that follows `header`.

    Raises:
        WireError: the length is above the limit.
    """
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
    if length > limit:
        raise WireError(f"a frame announces {length} bytes; from this peer, now, the limit is {limit}")
    return length


def frames(received: bytearray, limit: int = MAX_FRAME_BYTES) -> Iterator[Message]:
    """Yield the messages of all complete frames, and remove their bytes from `received`."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + body_length(bytes(received[: _LENGTH.size]), limit)
        if len(received) < end:
            return
        message = decode(bytes(received[_LENGTH.size : end]))
        del received[:end]
        yield message


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one frame, with file descriptors if the socket is a Unix socket."""
    frame = encode(message)
    with breaking():
        sent = socket.send_fds(sock, [frame], fds) if fds else 0
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Return the next message. None if the peer closed the connection between two frames."""
    message, _ = receive_fds(sock, 0, limit)
    return message


def receive_fds(sock: socket.socket, max_fds: int, limit: int = MAX_FRAME_BYTES) -> tuple[Message | None, list[int]]:
    """Return the next message and the file descriptors received with it. The message is None at the connection's
    end."""
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
    """Fill `destination` with received bytes."""
    filled = 0
    while filled < len(destination):
        with breaking():
            count = sock.recv_into(destination[filled:])
        if count == 0:
            raise WireError("the peer closed in the middle of a frame")
        filled += count


async def read(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Return the next message of an asyncio stream. None if the peer closed the connection between two frames."""
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
    """Return the process id of a Unix-socket peer, as reported by the kernel.

    Raises:
        WireError: the peer is a process of a different user.
    """
    with breaking():
        pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise WireError(f"a process of user {uid} connected; this socket is for user {os.getuid()}")
    return int(pid)


_TRIES = 5
_BUSY_S = 0.05
"""Seconds before a retry. Thousands of foreign clients may take a peer's place before it has sent its proof."""
Connected = TypeVar("Connected")


def again_while_busy(connect: Callable[[], Connected]) -> Connected:
    """Return `connect()`. Retries a few times if the server closes the connection during the handshake.

    Raises:
        OSError: the last error of `connect`.
    """
    for _ in range(_TRIES - 1):
        try:
            return connect()
        except BusyError:
            time.sleep(_BUSY_S)
    return connect()


HANDSHAKE_S = 10.0
"""Time limit, in seconds, from accepting a connection to the peer's proof."""
REFUSED: Message = {"refused": True}
"""A server's answer to a client without the job's secret. If all places are taken, the server closes the connection
instead."""
_NOT_SHOWN = "a peer has not shown within {:g} s that it is of this job"
_HANDSHAKE_BYTES = 1024  # maximum frame from an unauthenticated peer


def _equal(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="replace"), expected.encode())


def _proof(secret: bytes, role: str, first: str, second: str) -> str:
    return hmac.new(secret, f"{role}:{first}:{second}".encode(errors="replace"), hashlib.sha256).hexdigest()


def admit(secret: bytes, ours: str, answer: Message | None) -> Message:
    """Check a client's answer to the nonce `ours`, and return the server's own proof for the client.

    Raises:
        WireError: the client does not have the job's secret.
    """
    if answer is None:
        raise WireError("a peer hung up before it had shown the job's secret")
    theirs = str(answer.get("nonce"))
    if not _equal(answer.get("proof"), _proof(secret, "client", ours, theirs)):
        raise WireError("a peer without the job's secret was refused")
    return {"proof": _proof(secret, "server", theirs, ours)}


async def accept_peer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, encrypted: bool = False
) -> None:
    """Run the server's side of the handshake on an asyncio stream, with TLS if `encrypted`.

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
            # the answer may have arrived while this process had no time to read it
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
    if writer.transport is None:  # the connection was closed in the meantime
        raise WireError("a TLS handshake was cut off")


def _challenge(nonce: str, encrypted: bool) -> Message:
    return {"nonce": nonce, "tls": True} if encrypted else {"nonce": nonce}


def accept_peer_blocking(sock: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_S) -> None:
    """Run the server's side of the handshake on a blocking socket, with TLS if it is an `ssl.SSLSocket`.

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
    """Return an authenticated connection to another agent of the job. The caller must set a time limit.

    Raises:
        OSError: no agent listens at the address.
        BusyError, WireError: as in `join_peer`.
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
    """Run the client's side of the handshake on an asyncio stream.

    Raises:
        BusyError: the server has not answered. A retry may help.
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
    """Check that both sides use TLS or neither does. A client with TLS must never continue without it.

    Raises:
        RefusedError: only one side uses TLS.
    """
    if (challenge.get("tls") is True) != encrypted:
        has = "requires TLS, but this process has none" if not encrypted else "has no TLS, but this process requires it"
        raise RefusedError(f"the server {has}: network.tls must be the same on all nodes")


def join_peer_blocking(
    sock: socket.socket, secret: bytes, timeout_s: float = 3 * HANDSHAKE_S, *, encrypted: bool = False
) -> socket.socket:
    """Run the client's side of the handshake on a blocking socket.

    Returns the socket to use afterwards, which is a different one if `encrypted`.

    Raises:
        BusyError: the server has closed the connection without an answer, because it is ending or many peers
            connect.
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
            answer = handshake.answered("on our proof")
    except (WireError, BusyError):
        raise
    except ConnectionError as error:  # a retry may help
        raise BusyError(_HUNG_UP.format("in the handshake")) from error
    except TimeoutError as error:
        raise WireError(f"the server has finished no handshake within {timeout_s:g} s") from error
    _check_server(secret, ours, challenge, answer)
    return sock


_HUNG_UP = "the server hung up {}: it is ending, or many peers came at once"


class _Handshake:
    """The frames of one handshake on a blocking socket. One deadline applies to all of them together."""

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
        """Start TLS as the server, after sending the challenge in the clear."""
        self._set_timeout()
        socket.socket.sendall(sock, challenge)
        self._set_timeout()
        sock.do_handshake()

    def wrap(self) -> ssl.SSLSocket:
        """Start TLS as the client."""
        self._set_timeout()
        self._sock = wrapped = tls.client_context().wrap_socket(self._sock)
        return wrapped

    def receive(self) -> Message | None:
        """Return the next message. None if the peer closed the connection between two frames."""
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
        raise RefusedError("the server hung up on our proof: it has another job's secret")
    expected = _proof(secret, "server", ours, str(challenge.get("nonce")))
    if not _equal(answer.get("proof"), expected):
        raise RefusedError("the server does not have the job's secret; this is not our job's endpoint")
