"""A small key-value server in each rank. Together, the servers of all ranks are the store of the process groups.

Each key is stored on one rank (`store.py` routes requests), so no process serves all keys, and no single process must
survive. A key belongs to one generation. When a generation ends, all waits for its keys fail at once. One thread serves
all connections of a server. The server's own rank calls the server directly, without a socket.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection

from hyperpod_ext.ports import family_of
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc import unproven
from hyperpod_ext.runtime.ipc.connections import disconnect
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.process_group.store_keys import StoreKeys

_BACKLOG = 1024
"""Number of connections that may wait to be accepted; large because all ranks of a job may connect at once."""
_UNKNOWN_BYTES = 1024
"""Maximum number of received bytes to keep for each connection that is not authenticated yet."""
_PROVE_S = 10.0
_LONGEST_WAIT_S = 3600.0
_UNPROVEN = 1024
"""Maximum number of connections that are not authenticated yet."""
_PAUSE_S = 0.1
"""Seconds for which the server accepts no connections after this process could not open another file."""
_ACCEPTED_AT_ONCE = 64
"""Maximum number of connections to accept before existing connections are read. Reading authenticates connections,
which then do not count against `_UNPROVEN`."""


class _Peer:
    """A connection to this server: its received bytes, its unsent bytes, and whether it is authenticated."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.nonce = secrets.token_hex(16)
        self.known = False
        self.since = time.monotonic()
        self.received = bytearray()
        self.unsent = bytearray()

    def frames(self) -> list[wire.Message]:
        """Return the complete received messages, and remove them from `received`.

        Raises:
            WireError: a frame is invalid, or too long for a connection that is not authenticated.
        """
        return list(wire.frames(self.received, wire.MAX_FRAME_BYTES if self.known else _UNKNOWN_BYTES))


class _Answer:
    """The answer to a request of this process. A `threading.Event` is created only if no answer exists at once."""

    def __init__(self) -> None:
        self.message: wire.Message | None = None
        self.given: threading.Event | None = None

    def give(self, message: wire.Message) -> None:
        self.message = message
        if self.given is not None:
            self.given.set()


class RankServer:
    """The keys of one rank, and the TCP server that serves the keys to processes with the job's secret.

    Args:
        secret: the job's secret.
        on_error: called with the error if an error ends the server's thread.
    """

    def __init__(self, secret: bytes, on_error: Callable[[str], None], places: int = _UNPROVEN) -> None:
        self._secret, self._on_error = secret, on_error
        self._unproven: Unproven[_Peer] = Unproven(unproven.places(places), self._drop)
        self._pausing = False
        """Whether the server accepts no connections for `_PAUSE_S`, because this process cannot open more files."""
        self._keys: StoreKeys[_Peer] = StoreKeys(self._push)
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._peers: set[_Peer] = set()
        self._full: set[_Peer] = set()
        """Connections whose send buffers are full. The thread continues to send when a send buffer has room again."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self.requests = 0
        """Number of requests that this server has executed, including requests of its own rank."""

    def start(self, host: str = "", port: int = 0) -> int:
        """Listen on `port` of the numeric address `host`, and return the port.

        Port 0 selects a free port. An empty host selects all addresses of this machine.
        """
        if host:
            self._listener = socket.create_server((host, port), family=family_of(host), backlog=_BACKLOG)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self._wake_read.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hpx-store", daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def enter(self, generation: int) -> None:
        """Drop the keys of older generations, and make waits for these keys fail."""
        with self._lock:
            self._keys.enter(generation)

    def close(self) -> None:
        """Close all connections and end the server's thread."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()

    def ask(self, request: wire.Message, timeout_s: float) -> wire.Message | None:
        """Execute a request of this process. Returns the answer; None if there is no answer within `timeout_s`."""
        answer = _Answer()
        with self._lock:
            self.requests += 1
            self._keys.answer(request, answer.give)
            if answer.message is not None:
                return answer.message
            answer.given = threading.Event()
        self._wake()  # the thread must also watch this request's timeout
        answer.given.wait(timeout_s)
        return answer.message

    # --- the thread -----------------------------------------------------------------------------

    def _wake(self) -> None:
        # ignore errors: with a full socket, the thread wakes anyway; with a closed socket, the thread has ended
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    timeout = self._keys.expire()
                if self._unproven.all():
                    timeout = min(_PROVE_S if timeout is None else timeout, 1.0)
                    self._drop_silent()
                if pausing := self._pausing:
                    timeout = min(_PAUSE_S if timeout is None else timeout, _PAUSE_S)
                for key, events in self._selector.select(None if timeout is None else min(timeout, _LONGEST_WAIT_S)):
                    self._handle(key, events)
                self._finish_sending()
                if pausing:
                    self._accept_again()
        except Exception as error:  # `on_error` decides whether the rank can continue
            self._on_error(f"the rank's key-value server: {type(error).__name__}: {error}")
        finally:
            self._hang_up()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            peer: _Peer = key.data
            if peer not in self._peers:
                return  # the connection was just dropped to make room for a new connection
            try:
                if events & selectors.EVENT_READ:
                    self._read(peer)
            # the connection is closed, or the peer has broken the protocol
            except (OSError, ValueError, KeyError, TypeError):
                self._drop(peer)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._unproven.hang_up_oldest():
                    return
                self._pausing = True  # out of files or memory, or a network error: accept again later
                self._selector.unregister(self._listener)
                return
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # the peer has already closed the connection
                sock.close()
                continue
            peer = _Peer(sock)
            self._peers.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._send(peer, {"nonce": peer.nonce})
            self._unproven.enter(peer)

    def _accept_again(self) -> None:
        assert self._listener is not None
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pausing = False

    def _read(self, peer: _Peer) -> None:
        while True:
            try:
                data = peer.socket.recv(1 << 16)
            except BlockingIOError:
                break
            if not data:
                raise ConnectionResetError("the peer hung up")
            peer.received += data
            if len(data) < 1 << 16:
                break
        for message in peer.frames():
            if not peer.known:
                try:
                    proof = wire.admit(self._secret, peer.nonce, message)
                except wire.WireError:
                    self._send(peer, wire.REFUSED)
                    raise
                self._send(peer, proof)
                peer.known = True
                self._unproven.leave(peer)
                continue
            with self._lock:
                self.requests += 1
                self._keys.answer(message, lambda answer: self._send(peer, answer), peer)

    def _send(self, peer: _Peer, message: wire.Message) -> None:
        """Send a message to a peer. The caller must hold the lock if other threads may use the peer."""
        self._send_frame(peer, wire.encode(message))

    def _push(self, peers: Collection[_Peer], message: wire.Message) -> None:
        """Push a watched key's value to `peers`. Skips peers with unsent bytes, which can request the key later."""
        frame = wire.encode(message)
        for peer in peers:
            if not peer.unsent:
                self._send_frame(peer, frame)

    def _send_frame(self, peer: _Peer, frame: bytes) -> None:
        if not peer.unsent:
            try:
                frame = frame[peer.socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                disconnect(peer.socket)  # bytes may be lost, so close; the thread then drops the peer
                return
        if frame:
            peer.unsent += frame
            self._full.add(peer)
            self._wake()

    def _finish_sending(self) -> None:
        with self._lock:
            for peer in list(self._full):
                try:
                    del peer.unsent[: peer.socket.send(peer.unsent)]
                except BlockingIOError:
                    pass
                except OSError:
                    peer.unsent.clear()
                    disconnect(peer.socket)
                if not peer.unsent:
                    self._full.discard(peer)
                if peer in self._peers:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
                    self._selector.modify(peer.socket, events, peer)

    def _drop_silent(self) -> None:
        for peer in self._unproven.all():
            if time.monotonic() - peer.since <= _PROVE_S:
                break
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._unproven.leave(peer)
        with self._lock:
            self._peers.discard(peer)
            self._full.discard(peer)
            self._keys.forget(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def _hang_up(self) -> None:
        with self._lock:
            self._keys.enter(self._keys.generation + 1)
        for peer in list(self._peers):
            self._drop(peer)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
