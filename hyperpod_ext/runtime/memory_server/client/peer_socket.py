"""Sockets between memory servers: who joins with which patience, and bytes checksummed while they arrive."""

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
"""Replicas are cut at multiples of this: what is sent between two looks at whether it is still wanted."""
PIECE = 1 << 20
"""Received at once: still in the cache when its checksum is taken."""
TIMEOUT_S = 30.0
"""Without a byte from a peer, or taken by it, for this long, it counts as gone."""
_BUFFERS = 256  # of one receive; the kernel takes 1024
_SEND_BUFFER = 192 << 10
"""What is on its way stays in the cache: a fifth less CPU on both sides than with the megabytes that the kernel comes
to by itself. Less than a few segments of loopback would have it wait for acknowledgements that are held back."""
_FLOW_BYTES_PER_S = 1.25e9
"""The most that one connection gets in EC2: 10 Gbit/s, within a placement group."""
_TCP_INFO_RTT = struct.Struct("=68xI")


def connect(
    host: str, port: int, secret: bytes, timeout_s: float = TIMEOUT_S, *, encrypted: bool = False
) -> socket.socket:
    """A connection to a peer of the same job, with TLS where `encrypted`.

    Raises:
        OSError: it cannot be reached, is not of this job, has no place, or does not answer.
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
    """The other side of `connect`.

    Raises:
        OSError: whoever connected is not of this job, or speaks another version.
    """
    prepare(sock, timeout_s)
    wire.accept_peer_blocking(sock, secret)


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Blocking, with patience that counts from the last byte that moved: one read may take minutes."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that vanished while nobody spoke
    (microseconds,) = _TCP_INFO_RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT.size))
    if (buffer := send_buffer(microseconds / 1e6)) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(timeout_s)  # it waits by itself, and takes no notice of the kernel's
        return
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        set_timeout(sock, option, timeout_s)


def send_buffer(rtt_s: float) -> int | None:
    """Bytes of a send buffer that holds no connection of this round trip time back; None: the kernel's choice."""
    return _SEND_BUFFER if rtt_s * _FLOW_BYTES_PER_S <= 2 * _SEND_BUFFER else None  # the kernel takes twice that


def wait_readable(sock: socket.socket, seconds: float | None = None) -> bool:
    """Whether something is there to be read, the end included."""
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
    """Fill `destination`; returns its CRC64-NVME, continued from `previous`."""
    checksum, filled = previous, 0
    while filled < len(destination):
        count = _fill(sock, destination[filled : filled + PIECE])
        if count == 0:
            raise wire.WireError("the peer closed in the middle of a snapshot")
        checksum = crc64nvme(destination[filled : filled + count], checksum)
        filled += count
    return checksum


def _fill(sock: socket.socket, piece: memoryview) -> int:
    """Receive into all of `piece`; returns how much has come, less where the peer has closed."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(piece, 0, socket.MSG_WAITALL)
    filled = 0
    while filled < len(piece) and (count := sock.recv_into(piece[filled:])):
        filled += count
    return filled


def receive_scattered(sock: socket.socket, destinations: Sequence[memoryview], previous: int = 0) -> int:
    """Fill all of `destinations` in order; returns the CRC64-NVME over what came."""
    checksum = previous
    for batch in _batches(destinations):
        if len(batch) == 1 or isinstance(sock, ssl.SSLSocket):
            for buffer in batch:
                checksum = receive_checked(sock, buffer, checksum)
            continue
        count = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise wire.WireError("the peer closed in the middle of a snapshot")
        for buffer in batch:
            here = min(count, len(buffer))
            checksum = crc64nvme(buffer[:here], checksum) if here else checksum
            checksum = receive_checked(sock, buffer[here:], checksum)
            count -= here
    return checksum


def _batches(destinations: Sequence[memoryview]) -> list[list[memoryview]]:
    """`destinations` in order, those that are small many at a time."""
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
    """Do `work(0)` ... `work(count - 1)` at the same time; returns what went wrong once all have ended."""
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
        except RuntimeError as error:  # out of threads
            failures.append(error)
            break
        threads.append(thread)
    for thread in threads:
        thread.join()
    return failures
