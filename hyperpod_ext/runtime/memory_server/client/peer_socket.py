"""Functions for sockets between memory servers: connect, set time limits, and receive bytes with a checksum."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence

from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import disconnect as disconnect
from hyperpod_ext.runtime.ipc.declared import with_version
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

CHUNK = 4 << 20
"""Size in bytes of the chunks in which a replica is sent. After each chunk, the sender checks for cancellation."""
PIECE = 1 << 20
"""Maximum bytes of one receive call, so few that they are still in the CPU cache when their checksum is computed."""
TIMEOUT_S = 30.0
"""Seconds after which a peer counts as gone if it has neither sent nor accepted a byte."""
_BUFFERS = 256  # maximum number of buffers in one receive call; the kernel allows 1024
_SEND_BUFFER = 192 << 10
"""Size of the send buffer in bytes. With this size, unsent bytes stay in the CPU cache, so sender and receiver need a
fifth less CPU time than with the kernel's default of several megabytes. A send buffer of only a few loopback segments
would make the sender wait for delayed acknowledgements."""
_FLOW_BYTES_PER_S = 1.25e9
"""Maximum rate of one connection in EC2, in bytes per second: 10 Gbit/s within a placement group."""
_TCP_INFO_RTT = struct.Struct("=68xI")


def connect(
    host: str, port: int, secret: bytes, timeout_s: float = TIMEOUT_S, *, encrypted: bool = False
) -> socket.socket:
    """Return a connection to a peer of the same job, with TLS if `encrypted`.

    Raises:
        OSError: the peer is unreachable, belongs to another job, has too many connections, or does not answer.
    """
    return wire.again_while_busy(lambda: _connect_once(host, port, secret, timeout_s, encrypted))


def _connect_once(host: str, port: int, secret: bytes, timeout_s: float, encrypted: bool) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        prepare(sock, timeout_s)
        sock = wire.join_peer_blocking(sock, secret, timeout_s, encrypted=encrypted)
        if encrypted:
            sock.settimeout(timeout_s)
        wire.send(sock, with_version({}))
    except BaseException:
        sock.close()
        raise
    return sock


def accept(sock: socket.socket, secret: bytes, timeout_s: float) -> None:
    """Authenticate a client that has connected with `connect`.

    Raises:
        OSError: the client belongs to another job, or has a different protocol version.
    """
    prepare(sock, timeout_s)
    wire.accept_peer_blocking(sock, secret)


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Set the options of a blocking socket. `timeout_s` limits the time without a transferred byte, but not a whole
    transfer, which may take minutes."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # detect the loss of the peer's node even while the connection is idle
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    (microseconds,) = _TCP_INFO_RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT.size))
    if (buffer := send_buffer(microseconds / 1e6)) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(timeout_s)  # an SSL socket ignores the kernel's time limits
        return
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        set_timeout(sock, option, timeout_s)


def send_buffer(rtt_s: float) -> int | None:
    """Return the size in bytes of a small send buffer, if a small buffer does not slow down a connection with round
    trip time `rtt_s`.

    Returns None if the kernel should choose the size.
    """
    return _SEND_BUFFER if rtt_s * _FLOW_BYTES_PER_S <= 2 * _SEND_BUFFER else None  # the kernel doubles this size


def wait_readable(sock: socket.socket, seconds: float | None = None) -> bool:
    """Wait until the socket has data to read or the peer has closed the connection. Returns False after `seconds`."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    full_s = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", full_s, int((seconds - full_s) * 1e6)))


def receive_checked(sock: socket.socket, destination: memoryview, previous: int = 0) -> int:
    """Fill `destination` from the socket. Returns the CRC64-NVME of the received bytes, continued from the checksum
    `previous`."""
    checksum, filled = previous, 0
    while filled < len(destination):
        count = _fill(sock, destination[filled : filled + PIECE])
        if count == 0:
            raise wire.WireError("the peer closed the connection in the middle of a snapshot")
        checksum = crc64nvme(destination[filled : filled + count], checksum)
        filled += count
    return checksum


def _fill(sock: socket.socket, piece: memoryview) -> int:
    """Fill `piece` from the socket. Returns the number of received bytes, which is less than the size of `piece` only
    if the peer has closed the connection."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(piece, 0, socket.MSG_WAITALL)
    filled = 0
    while filled < len(piece) and (count := sock.recv_into(piece[filled:])):
        filled += count
    return filled


def receive_scattered(sock: socket.socket, destinations: Sequence[memoryview], previous: int = 0) -> int:
    """Fill all `destinations` in order. Returns the CRC64-NVME of the received bytes, continued from the checksum
    `previous`."""
    checksum = previous
    for batch in _batches(destinations):
        if len(batch) == 1 or isinstance(sock, ssl.SSLSocket):
            for buffer in batch:
                checksum = receive_checked(sock, buffer, checksum)
            continue
        count = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise wire.WireError("the peer closed the connection in the middle of a snapshot")
        for buffer in batch:
            here = min(count, len(buffer))
            checksum = crc64nvme(buffer[:here], checksum) if here else checksum
            checksum = receive_checked(sock, buffer[here:], checksum)
            count -= here
    return checksum


def _batches(destinations: Sequence[memoryview]) -> list[list[memoryview]]:
    """Group `destinations`, in order, into batches that each have either one large buffer or several small buffers."""
    batches: list[list[memoryview]] = [[]]
    nbytes = 0
    for buffer in destinations:
        if batches[-1] and (nbytes + len(buffer) > PIECE or len(batches[-1]) == _BUFFERS):
            batches.append([])
            nbytes = 0
        batches[-1].append(buffer)
        nbytes += len(buffer)
    return [batch for batch in batches if batch]


def in_threads(work: Callable[[int], None], count: int, name: str) -> list[BaseException]:
    """Call `work` with each number from 0 to `count - 1`, all at the same time, in one thread each. Returns the errors
    of these calls once all threads have ended."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads: list[threading.Thread] = []
    for index in range(count):
        thread = threading.Thread(target=guarded, args=(index,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no further thread
            failures.append(error)
            break
        threads.append(thread)
    for thread in threads:
        thread.join()
    return failures
