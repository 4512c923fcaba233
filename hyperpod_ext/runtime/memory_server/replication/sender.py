"""Sends copies of snapshots to one peer (another node's memory server), directly from shared memory."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from hyperpod_ext.errors import CorruptSnapshotError, UnreachableError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import (
    AskPiece,
    Chunk,
    PartBegin,
    ReadChunks,
    ReplicaBegin,
    ReplicaBegun,
    ReplicaEnd,
)
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, read_answer
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.incoming import MOST_CHUNKS_READ
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlFailure, NixlTransfer, signed_offer
from hyperpod_ext.runtime.memory_server.replication.rate_limit import RateLimit
from hyperpod_ext.runtime.memory_server.slots.pins import Pin
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.parity import Stripe

T = TypeVar("T")

_LOOK_S = 0.1  # seconds between two checks for cancellation while the peer accepts no bytes
_UNANSWERED = 8  # maximum number of unanswered chunks on one connection
_UNREAD = 1  # maximum number of unanswered `read_chunks` requests on one connection
_BACKOFF_S = (0.5, 30.0)

Stop = Callable[[], bool]


class Superseded(Exception):  # noqa: N818 not an error
    """The copy of a snapshot was cancelled, because a save needs the snapshot's slot."""


class _Remaining:
    """The chunks of a snapshot that must still be sent. Several connections take chunks from this object. Thread-safe.

    Args:
        first: number of bytes from the snapshot's start that the peer already has.
        by_nixl: whether the peer reads the chunks from this node's memory with NIXL.
    """

    def __init__(self, nbytes: int, first: int, *, by_nixl: bool) -> None:
        self._by_nixl = by_nixl
        self._chunks = deque(_chunks(first, nbytes - first))
        self._lock = threading.Lock()

    def take(self, together: int) -> tuple[int, int, bool] | None:
        """Return the start and length of the next chunks, and whether the peer reads them with NIXL. None if no chunks
        are left.

        `together` is the maximum number of chunks in one read with NIXL.
        """
        with self._lock:
            if not self._chunks:
                return None
            start, nbytes = self._chunks.popleft()
            for _ in range(1, together if self._by_nixl else 1):
                if self._chunks and self._chunks[0][0] == start + nbytes:
                    nbytes += self._chunks.popleft()[1]
            return start, nbytes, self._by_nixl

    def send(self, start: int, nbytes: int) -> None:
        """Send bytes that the peer could not read with NIXL over TCP, and also all remaining chunks."""
        with self._lock:
            self._by_nixl = False
            self._chunks.extendleft(reversed(_chunks(start, nbytes)))


def _chunks(start: int, nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(ps.CHUNK, start + nbytes - at)) for at in range(start, start + nbytes, ps.CHUNK)]


class PeerSender:
    """Sends snapshots to one peer, one at a time. `connect` must be called before each snapshot."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes,
        streams: int,
        rate_limit: RateLimit,
        cpu_priority: CpuPriority,
        timeout_s: float = ps.TIMEOUT_S,
        encrypted: bool = False,
        nixl: NixlTransfer | None = None,
    ) -> None:
        self._encrypted, self._nixl = encrypted, nixl
        self.fell_back = ""
        """Why copies use TCP although NIXL is configured; empty if copies use NIXL or NIXL is not configured."""
        self.address = (host, port)
        self._secret, self._streams, self._rate_limit, self._timeout_s = secret, streams, rate_limit, timeout_s
        self._cpu_priority = cpu_priority
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._wait_s, self._not_before = 0.0, 0.0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Abort the running copy, and stop sending."""
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                ps.disconnect(sock)

    def try_nixl_again(self) -> None:
        """Try NIXL again for the next copies, if NIXL is configured. This method is called when nodes have changed,
        which may have ended the cause of NIXL's failure."""
        self.fell_back = ""

    def connect(self) -> None:
        """Open the connections to the peer, and start NIXL. Call this method before a snapshot is pinned, because
        connecting may take long.

        Raises:
            UnreachableError: the peer is unreachable, or was so recently that this call makes no new attempt.
        """
        if (left := self._not_before - time.monotonic()) > 0:
            raise UnreachableError(f"{self} failed a moment ago; the next attempt is in {left:.1f} s")
        if any(ps.wait_readable(sock, 0) for sock in self._sockets):
            # a readable socket although no answer is due: the peer was restarted, and has closed the connection
            self._disconnect()
        try:
            while len(self._sockets) < self._streams:
                sock = ps.connect(*self.address, self._secret, self._timeout_s, encrypted=self._encrypted)
                with self._lock:
                    self._sockets.append(sock)
                    if self._closed:
                        raise UnreachableError(f"{self} is no longer a peer of this node")
        except OSError as error:
            raise self._failed(error) from error
        if self._nixl is not None and not self.fell_back:
            try:
                self._nixl.start()
            except NixlFailure as failure:
                self.fell_back = str(failure)

    def send(self, pin: Pin, plan: Plan) -> int:
        """Send a snapshot to the peer. Returns the number of bytes sent, which is 0 if the peer already has the
        snapshot.

        Raises:
            Superseded: the pin was cancelled.
            UnreachableError: the peer is lost, or does not accept bytes.
            HyperpodExtError: the peer has answered with any other error.
        """
        return self._guarded(lambda: self._send(pin, plan))

    def _guarded(self, work: Callable[[], T]) -> T:
        """Call `work` and return its result. If `work` raises an error, close the connections to the peer."""
        try:
            done = work()
        except OSError as error:
            raise self._failed(error) from error
        except BaseException:
            self._disconnect()  # half a message may have been sent; on disconnect, the peer drops the copy
            raise
        self._wait_s = 0.0
        return done

    def send_part(self, pin: Pin, plan: Plan, stripe: Stripe, part: memoryview, checksum: str, stop: Stop) -> int:
        """Send a part of a snapshot, which the peer XORs into its parity piece. Returns the number of bytes sent.

        Raises the same errors as `send`.
        """

        def begin(control: socket.socket, document: dict[str, Any] | None) -> ReplicaBegun:
            request = PartBegin(manifest=pin.manifest, plan=document, stripe=stripe.ranks, crc64nvme=checksum)
            return self._ask(control, request, stop)

        def bring() -> int:
            control = self._sockets[0]
            begun = begin(control, None)
            if begun.need_plan:
                begun = begin(control, plan.to_json())
            if begun.token is None:
                return 0
            self._send_chunks(begun.token, part, stop)
            self._ask(control, ReplicaEnd(token=begun.token), stop)
            return len(part)

        return self._guarded(bring)

    def wait_piece(self, pin: Pin, wait_s: float, stop: Stop) -> bool:
        """Wait at most `wait_s` until the peer's parity piece that contains a part of this snapshot is complete.
        Returns whether the piece is complete.

        Raises the same errors as `send`.
        """
        manifest = pin.manifest
        request = AskPiece(
            owner=int(manifest["rank"]), save_id=str(manifest["save_id"]), step=int(manifest["step"]), wait_s=wait_s
        )
        self.connect()  # an error while sending another snapshot may have closed the connections
        try:
            return self._ask(self._sockets[0], request, stop).complete
        except OSError as error:
            raise self._failed(error) from error
        except Superseded:
            self._disconnect()
            raise

    def __str__(self) -> str:
        return f"peer {self.address[0]}:{self.address[1]}"

    def _failed(self, error: OSError) -> UnreachableError:
        self._disconnect()
        self._wait_s = min(max(2 * self._wait_s, _BACKOFF_S[0]), _BACKOFF_S[1])
        self._not_before = time.monotonic() + self._wait_s
        return UnreachableError(f"{self}: {error or type(error).__name__}")

    def _disconnect(self) -> None:
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()

    def _send(self, pin: Pin, plan: Plan) -> int:
        control, stop, data = self._sockets[0], pin.cancelled, pin.data
        while True:
            begun = self._ask(control, ReplicaBegin(manifest=pin.manifest), stop)
            if begun.need_plan:
                begun = self._ask(control, ReplicaBegin(manifest=pin.manifest, plan=plan.to_json()), stop)
            if begun.token is None:
                return 0
            with self._offered(control, begun.token, pin) as offered:
                self._send_chunks(begun.token, data, stop, begun.first, by_nixl=offered)
            try:
                self._ask(control, ReplicaEnd(token=begun.token), stop)
            except CorruptSnapshotError as error:
                if not offered:
                    raise
                self.fell_back = f"the bytes that the peer read differ from the snapshot: {error}"
                continue
            return len(data) - begun.first

    @contextmanager
    def _offered(self, control: socket.socket, token: int, pin: Pin) -> Iterator[bool]:
        """Offer the memory of a snapshot to the peer, so that the peer can read the snapshot with NIXL. Yields True if
        the peer accepts."""
        with ExitStack() as stack:
            accepted = False
            if self._nixl is not None and not self.fell_back:
                try:
                    exposed = stack.enter_context(self._nixl.expose(pin.region, pin.cancelled))
                    start = pin.index * pin.region.slot_bytes
                    offer = signed_offer(token, self._nixl.version, exposed, start, self._secret)
                    self.fell_back = self._ask(control, offer, pin.cancelled).why_not
                    accepted = not self.fell_back
                except NixlFailure as failure:
                    if pin.cancelled():
                        raise Superseded from failure
                    self.fell_back = str(failure)
            yield accepted

    def _send_chunks(self, token: int, data: memoryview, stop: Stop, first: int = 0, *, by_nixl: bool = False) -> None:
        """Send all chunks from byte `first` on, over all connections. If `by_nixl`, send `read_chunks` requests instead
        of bytes."""
        left, failed = _Remaining(len(data), first, by_nixl=by_nixl), threading.Event()

        def work(stream: int) -> None:
            self._cpu_priority.lower_this_thread()
            try:
                self._stream(self._sockets[stream], token, data, left, lambda: stop() or failed.is_set())
            except BaseException:
                failed.set()
                raise

        failures = ps.in_threads(work, len(self._sockets), f"to {self}")
        if failures:  # raise an error that is not `Superseded`: it may have caused the others
            raise next((failure for failure in failures if not isinstance(failure, Superseded)), failures[0])

    def _stream(self, sock: socket.socket, token: int, data: memoryview, left: _Remaining, stop: Stop) -> None:
        unanswered: deque[Chunk | ReadChunks] = deque()
        while (span := left.take(self._together())) is not None or unanswered:
            if span is not None:
                start, nbytes, by_nixl = span
                self._rate_limit.take(nbytes, stop)
                request = (ReadChunks if by_nixl else Chunk)(token=token, start=start, nbytes=nbytes)
                self._push(sock, memoryview(wire.encode(encode(request))), stop)
                if not by_nixl:
                    self._push(sock, data[start : start + nbytes], stop)
                unanswered.append(request)
            if span is None or len(unanswered) > (_UNREAD if by_nixl else _UNANSWERED):
                self._chunk_answered(sock, unanswered.popleft(), left, stop)

    def _together(self) -> int:
        """Return the maximum number of chunks in one `read_chunks` request, which is 1 if the rate is limited."""
        return MOST_CHUNKS_READ if math.isinf(self._rate_limit.rate) else 1

    def _chunk_answered(self, sock: socket.socket, request: Chunk | ReadChunks, left: _Remaining, stop: Stop) -> None:
        if isinstance(request, Chunk):
            self._answer(sock, request, stop)
        elif failed := self._answer(sock, request, stop).failed:
            self.fell_back = self.fell_back or failed
            left.send(request.start, request.nbytes)

    def _ask(self, sock: socket.socket, request: Request[A], stop: Stop) -> A:
        self._push(sock, memoryview(wire.encode(encode(request))), stop)
        return self._answer(sock, request, stop)

    def _push(self, sock: socket.socket, data: memoryview, stop: Stop) -> None:
        """Send all bytes, as `socket.sendall` does. Raises Superseded once `stop()` returns true."""
        gives_up_at = time.monotonic() + self._timeout_s
        ps.set_timeout(sock, socket.SO_SNDTIMEO, _LOOK_S)
        while len(data):
            if stop():
                raise Superseded
            try:
                data = data[sock.send(data) :]
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > gives_up_at:
                    raise TimeoutError(f"it accepted no bytes for {self._timeout_s:.0f} s") from None
            else:
                gives_up_at = time.monotonic() + self._timeout_s

    def _answer(self, sock: socket.socket, request: Request[A], stop: Stop) -> A:
        gives_up_at = time.monotonic() + self._timeout_s
        while not ps.wait_readable(sock, _LOOK_S):
            if stop():
                raise Superseded
            if time.monotonic() > gives_up_at:
                raise TimeoutError(f"it did not answer for {self._timeout_s:.0f} s")
        ps.set_timeout(sock, socket.SO_RCVTIMEO, self._timeout_s)  # with TLS, the timeout applies to both directions
        answer = wire.receive(sock)
        if answer is None:
            raise wire.WireError("it closed the connection")
        return read_answer(request, answer)
