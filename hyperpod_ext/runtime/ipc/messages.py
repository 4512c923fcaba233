"""Messages between our processes: a 4-byte big-endian length, then JSON. Never pickle.

Unix sockets are trusted by the peer's user id, which the kernel vouches for; TCP peers prove with the
job's secret that they belong to the job, both ways, before any other message is read.
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
    """The peer sent something that is not of this protocol, or is not who it should be."""


class RefusedError(WireError):
    """One end does not belong to the other's job, or has other settings: a second try ends in the same way."""


class TooLongError(JobFailedError):
    """A message of ours is over the limit. Nothing was sent: the connection and the peer are as they were, and the same
    message would fail again."""


class BusyError(ConnectionError):
    """A server has not answered in time. It may when it is asked again."""


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        TooLongError: it is over the limit.
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
    """The object in a frame's body."""
    try:
        message = fast_json.load(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a frame is not a JSON object")
    return message


def body_length(header: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Length of the body that follows `header`; refuses sizes no honest peer sends."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
    if length > limit:
        raise WireError(f"a frame announces {length} bytes; from this peer, now, the limit is {limit}")
    return length


def frames(received: bytearray, limit: int = MAX_FRAME_BYTES) -> Iterator[Message]:
    """Messages whose frames have come whole. Their bytes are taken out of `received`."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + body_length(bytes(received[: _LENGTH.size]), limit)
        if len(received) < end:
            return
        message = decode(bytes(received[_LENGTH.size : end]))
        del received[:end]
        yield message


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one frame, with file descriptors beside it where the socket is a Unix one."""
    frame = encode(message)
    with breaking():
        sent = socket.send_fds(sock, [frame], fds) if fds else 0
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Next frame, or None when the peer closed between frames."""
    message, _ = receive_fds(sock, 0, limit)
    return message


def receive_fds(sock: socket.socket, max_fds: int, limit: int = MAX_FRAME_BYTES) -> tuple[Message | None, list[int]]:
    """Next frame and the file descriptors that came with it."""
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
    """Fill `destination` with what comes next."""
    filled = 0
    while filled < len(destination):
        with breaking():
            count = sock.recv_into(destination[filled:])
        if count == 0:
            raise WireError("the peer closed in the middle of a frame")
        filled += count


async def read(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> Message | None:
    """Next frame from an asyncio stream, or None when the peer closed between frames."""
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


# --- who is there -------------------------------------------------------------------------------


def check_same_user(sock: socket.socket) -> int:
    """Refuse a Unix-socket peer of another user; returns the peer's process id, as the kernel knows it."""
    with breaking():
        pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise WireError(f"a process of user {uid} connected; this socket is for user {os.getuid()}")
    return int(pid)


_TRIES = 5
_BUSY_S = 0.05
"""Between two tries. Strangers by the thousand may take an honest peer's place before it has shown the secret."""
Connected = TypeVar("Connected")


def again_while_busy(connect: Callable[[], Connected]) -> Connected:
    """What `connect` returns, which is called again, a few times, where the server hangs up in the handshake.

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
"""From a connection to its proof, however many bytes come in between."""
REFUSED: Message = {"refused": True}
"""What a server says to a client without the job's secret. One that hangs up without it has no place for now."""
_NOT_SHOWN = "a peer has not shown within {:g} s that it is of this job"
_HANDSHAKE_BYTES = 1024  # whoever has not proved anything yet may not make us read more


def _equal(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="replace"), expected.encode())


def _proof(secret: bytes, role: str, first: str, second: str) -> str:
    return hmac.new(secret, f"{role}:{first}:{second}".encode(errors="replace"), hashlib.sha256).hexdigest()


def admit(secret: bytes, ours: str, answer: Message | None) -> Message:
    """What a server says to a client that has answered its nonce `ours`.

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
    """Server's half of the handshake, with TLS where `encrypted`.

    Raises:
        WireError: the peer has not shown the job's secret.
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
            writer.write(encode({"busy": True}))  # its answer may have come, and not have been read in time
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
    if writer.transport is None:  # it was closed meanwhile
        raise WireError("a TLS handshake was cut off")


def _challenge(nonce: str, encrypted: bool) -> Message:
    return {"nonce": nonce, "tls": True} if encrypted else {"nonce": nonce}


def accept_peer_blocking(sock: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_S) -> None:
    """Server's half of the handshake, on a blocking socket; with TLS where that is an `ssl.SSLSocket`.

    Raises:
        WireError: the peer has not shown the job's secret, `timeout_s` after this was called.
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
    """A connection to another agent of the job. How long that may take is the caller's affair.

    Raises:
        OSError: nobody listens there; BusyError and WireError among them, as `join_peer` has it.
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
    """Client's half of the handshake, on an asyncio stream.

    Raises:
        BusyError: the server has not come to an answer, and may when it is asked again.
        WireError: it does not have the job's secret, or says that this process does not.
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
    """Both ends encrypt, or none: a client that shall never goes on without."""
    if (challenge.get("tls") is True) != encrypted:
        has = "asks for TLS, and this process has none" if not encrypted else "has no TLS, and this process asks for it"
        raise RefusedError(f"the server {has}: network.tls must be the same on all nodes")


def join_peer_blocking(
    sock: socket.socket, secret: bytes, timeout_s: float = 3 * HANDSHAKE_S, *, encrypted: bool = False
) -> socket.socket:
    """Client's half of the handshake, on a blocking socket. Returns the one to go on with: another, where `encrypted`.

    Raises:
        BusyError: the server has hung up without a word: it is ending, or many came at once.
        WireError: the server is not of this job, or has not answered `timeout_s` after this was called.
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
    except ConnectionError as error:  # a second try may find nothing wrong
        raise BusyError(_HUNG_UP.format("in the handshake")) from error
    except TimeoutError as error:
        raise WireError(f"the server has finished no handshake within {timeout_s:g} s") from error
    _check_server(secret, ours, challenge, answer)
    return sock


_HUNG_UP = "the server hung up {}: it is ending, or many peers came at once"


class _Handshake:
    """Frames of one handshake on a blocking socket. All of them together have one deadline, however they come."""

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
        """As server, which says the first word in the open."""
        self._set_timeout()
        socket.socket.sendall(sock, challenge)
        self._set_timeout()
        sock.do_handshake()

    def wrap(self) -> ssl.SSLSocket:
        """As client."""
        self._set_timeout()
        self._sock = wrapped = tls.client_context().wrap_socket(self._sock)
        return wrapped

    def receive(self) -> Message | None:
        """Next frame; None when the peer closed between frames."""
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
