"""Slow strangers at the ports of a job: one byte now and then, for ever. Peers with the secret get in beside them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hyperpod_ext.runtime.agent.election import ElectionListener, places_for
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.http_server import HttpServer
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.metrics.endpoint import metrics_server
from hyperpod_ext.runtime.process_group.store_server import RankServer

SECRET = b"0123456789abcdef0123456789abcdef"
PLACES = 16
STRANGERS = 100
Address = tuple[str, int]


@contextlib.contextmanager
def memory_server(places: int = PLACES, *, encrypted: bool = False) -> Iterator[Address]:
    whole = Budget(1 << 20, lambda: 1 << 40)
    own = Regions(kind="own", job="j", secret=SECRET, budget=whole, slots=2)
    replicas = Regions(kind="replica", job="j", secret=SECRET, budget=whole, slots=2)
    options = {"secret": SECRET, "job": "j", "cpu_priority": CpuPriority(1.0), "host": "127.0.0.1"}
    server = PeerServer(own, replicas, Plans(), places=places, encrypted=encrypted, **options)
    server.start()
    yield "127.0.0.1", server.port
    server.close()


@contextlib.contextmanager
def rank_server() -> Iterator[Address]:
    errors: list[str] = []
    server = RankServer(SECRET, errors.append, places=PLACES)
    yield "127.0.0.1", server.start("127.0.0.1")
    server.close()
    assert errors == []


@contextlib.contextmanager
def agent(places: int = PLACES, *, encrypted: bool = False) -> Iterator[Address]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    errors: list[str] = []
    listener = ElectionListener(SECRET, errors.append, places=places, encrypted=encrypted)
    asyncio.run_coroutine_threadsafe(listener.open("127.0.0.1", 0), loop).result(10)
    host, _ = listener.address
    yield host, listener.address[1]
    asyncio.run_coroutine_threadsafe(listener.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert errors == []


def memory_server_tls() -> contextlib.AbstractContextManager[Address]:
    return memory_server(encrypted=True)


def agent_tls() -> contextlib.AbstractContextManager[Address]:
    return agent(encrypted=True)


ports = pytest.mark.parametrize("port", [memory_server, rank_server, agent, memory_server_tls, agent_tls])
Port = Callable[[], contextlib.AbstractContextManager[Address]]


class Strangers:
    """Connections that send a frame's header, and then a byte of its body whenever they are told to."""

    def __init__(self, address: Address, count: int) -> None:
        self._open = selectors.DefaultSelector()
        for _ in range(count):
            sock = socket.create_connection(address, timeout=10)
            sock.sendall(b"\x00\x00\x04\x00")
            self._open.register(sock, selectors.EVENT_READ)

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._open.get_map().values()):
            self._drop(key.fileobj)

    def _drop(self, sock: socket.socket) -> None:
        self._open.unregister(sock)
        sock.close()

    def send_a_byte(self) -> int:
        """Returns how many are still connected."""
        for key in list(self._open.get_map().values()):
            try:
                key.fileobj.send(b"x")
            except OSError:
                self._drop(key.fileobj)
        for key, _ in self._open.select(0):
            with contextlib.suppress(OSError):
                if key.fileobj.recv(1000):
                    continue
            self._drop(key.fileobj)
        return len(self._open.get_map())


def come_in(port: Port, address: Address, secret: bytes = SECRET) -> socket.socket:
    """As an honest peer does."""
    sock = socket.create_connection(address, timeout=10)
    return wire.join_peer_blocking(sock, secret, encrypted=port in (memory_server_tls, agent_tls))


@ports
def test_honest_peers_get_in_beside_slow_strangers(port: Port) -> None:
    with port() as address, Strangers(address, STRANGERS) as strangers:
        for _ in range(20):
            strangers.send_a_byte()
            come_in(port, address).close()


@ports
def test_only_so_many_strangers_keep_a_place(port: Port) -> None:
    with port() as address, Strangers(address, STRANGERS) as strangers:
        deadline = time.monotonic() + 5  # before the handshake's own deadline, which would end them all
        while strangers.send_a_byte() > PLACES and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert strangers.send_a_byte() <= PLACES


@ports
def test_those_who_have_shown_the_secret_keep_their_place(port: Port) -> None:
    with port() as address, come_in(port, address) as peer, Strangers(address, STRANGERS) as strangers:
        come_in(port, address).close()
        strangers.send_a_byte()
        peer.setblocking(False)
        with pytest.raises((BlockingIOError, ssl.SSLWantReadError)):
            peer.recv(1)


@pytest.mark.parametrize(
    ("shake_hands", "told"),
    [(wire.accept_peer_blocking, "within 0.2 s that it has the job"), (wire.join_peer_blocking, "within 0.2 s")],
)
def test_a_handshake_has_one_deadline_whatever_comes_before_it(shake_hands: Callable[..., None], told: str) -> None:
    """A byte at a time does not begin it anew."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(b"\x00\x00\x04\x00")
            while not stop.wait(0.02):
                theirs.sendall(b"x")

    thread = threading.Thread(target=dribble)
    with ours, theirs:
        thread.start()
        with pytest.raises(wire.WireError, match=told):
            shake_hands(ours, SECRET, 0.2)
        assert ours.gettimeout() is None
        stop.set()
        thread.join()


def test_the_oldest_makes_place() -> None:
    gone: list[str] = []
    unproven: Unproven[str] = Unproven(2, gone.append)
    for name in "abc":
        unproven.enter(name)
    assert gone == ["a"]
    unproven.leave("b")
    unproven.enter("d")
    assert gone == ["a"]
    assert unproven.hang_up_oldest()
    assert gone == ["a", "c"]
    unproven.leave("d")
    assert not unproven.hang_up_oldest()


@pytest.mark.parametrize("nodes", [1100, pytest.param(2048, marks=pytest.mark.thorough)])
def test_all_agents_of_a_large_job_may_come_at_once(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them makes place for another."""
    # the first that is there is the last to prove itself: how long that takes all others is not what is tested
    monkeypatch.setattr(wire, "HANDSHAKE_S", 100.0)
    with agent(places_for(nodes)) as address, contextlib.ExitStack() as coming:
        agents = [coming.enter_context(socket.create_connection(address, timeout=30)) for _ in range(nodes)]
        for sock in reversed(agents):
            wire.join_peer_blocking(sock, SECRET, 30)


@ports
def test_a_peer_of_another_job_is_told_so(port: Port) -> None:
    with port() as address, pytest.raises(wire.WireError, match=r"refused our proof: .* another job's secret"):
        come_in(port, address, b"another job's secret")


def test_a_server_that_hangs_up_at_once_is_not_said_to_lack_the_secret() -> None:
    with (
        hanging_up(times=100) as address,
        pytest.raises(wire.BusyError, match=r"closed the .* has too many connections"),
    ):
        ps.connect(*address, SECRET)


def test_a_peer_whose_place_was_taken_comes_again() -> None:
    with hanging_up(times=2) as address:
        ps.connect(*address, SECRET).close()


@contextlib.contextmanager
def hanging_up(times: int) -> Iterator[Address]:
    """A server that has no place for the first so many."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            for _ in range(times):
                listener.accept()[0].close()
            wire.accept_peer_blocking(listener.accept()[0], SECRET)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        ps.disconnect(listener)
    thread.join()


LIMITS = """
import resource, sys
from hyperpod_ext.runtime.ipc import unproven
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
print(unproven.places(10_000_000), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_job_may_open_as_many_files_as_the_machine_allows() -> None:
    """gloo ends its process where strangers have taken all."""
    output = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True).stdout
    places, soft, hard = map(int, output.split())
    expected = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert (places, soft) == (expected // 4, expected)


def endpoint_of_metrics(**places: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread, HttpServer, int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    endpoint = metrics_server(lambda: "step 7\n", str, pytest.fail, **places)
    port = asyncio.run_coroutine_threadsafe(endpoint.listen("127.0.0.1", 0), loop).result(10)
    return loop, thread, endpoint, port


def test_strangers_at_the_metrics_hold_no_more_than_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperpod_ext.runtime.metrics.endpoint._LIMIT_S", 600.0)  # which would end them, too
    loop, thread, endpoint, port = endpoint_of_metrics(places=PLACES)
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        stack.callback(lambda: asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result(10))
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(STRANGERS)]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as honest:
            honest.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"step 7" in b"".join(iter(lambda: honest.recv(1000), b""))
        gone = 0
        for stranger in strangers[: STRANGERS - PLACES]:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            gone += 1
        assert gone == STRANGERS - PLACES


def test_who_has_asked_for_the_metrics_is_heard_whoever_comes_meanwhile() -> None:
    """The process is busy, and a hundred come before it has read what an honest one has sent."""
    loop, thread, endpoint, port = endpoint_of_metrics()
    free = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        stack.callback(lambda: asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result(10))
        stack.callback(free.set)
        loop.call_soon_threadsafe(free.wait)
        honest = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        honest.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        for _ in range(90):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        free.set()
        assert b"step 7" in b"".join(iter(lambda: honest.recv(1000), b""))
