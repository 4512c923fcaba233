"""Thousands of strangers at every port of a job that runs: honest peers get in, no step is lost, nothing grows."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import crowd
import pytest

from hyperpod_ext.runtime.ipc import messages as wire

pytestmark = pytest.mark.slow

STEPS = 100
LONGEST_S = 890
MOST_MIB = 40
SHOWN = {"host": "127.0.0.1", "port": 0}
_RETRANSMITTED = struct.Struct("=100xI")
"""Of TCP_INFO: a connection attempt that no server had room for is made again a second later."""


def asks_for_a_proof(port: int) -> bool:
    """Whether a server of ours listens there, and no gloo."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
        try:
            return wire.receive(sock) is not None
        except TimeoutError:
            return False


def come_in(port: int, secret: bytes) -> int:
    """As an honest peer does; returns how often the kernel had to try again."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        wire.join_peer_blocking(sock, secret)
        return retransmitted(sock)


def read_metrics(port: int) -> int:
    """As Prometheus does."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        if not sock.recv(20).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("no metrics")
        return retransmitted(sock)


def retransmitted(sock: socket.socket) -> int:
    return int(_RETRANSMITTED.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED.size))[0])


def mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.mark.parametrize(
    ("each", "seconds", "times"),
    [
        pytest.param(1000, 0.0, 2, id="1000", marks=pytest.mark.thorough),
        pytest.param(2000, 60.0, 10, id="2000 for a minute", marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1200)
def test_no_honest_peer_waits_for_strangers(job: Any, undisturbed: Any, each: int, seconds: float, times: int) -> None:
    """Rank 0 is killed when half of them have come, and again when all have; who was hung up on comes again."""
    env = {"HPX_TEST_STEPS": str(3 * STEPS), "HPX_TEST_HOLD": json.dumps([[1, 0, STEPS], [2, 0, 2 * STEPS]])}
    settings = {"metrics": SHOWN, "restart": {"hang": {"enabled": False}}}
    running = job(settings=settings, env=env).start()
    shown = running.until("metrics_shown")["port"]
    running.until("step", step=5)
    secret = (running.folder / "secret").read_bytes()
    first = running.until("worker_started", rank=0)["pid"]
    ports = {port: pid for port, pid in crowd.ports_of(running.processes()).items() if pid != first}
    ours = [port for port in ports if port != shown and asks_for_a_proof(port)]
    gloo = set(ports) - {shown, *ours}
    assert len(ours) == 2 + 2 + 3, "agents, memory servers, and ranks that live on"
    assert gloo
    soft, hard = resource.prlimit(ports[ours[0]], resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 65_536), "gloo ends its process when strangers have taken all files"
    before = {ports[port]: mib(ports[port]) for port in ours}
    slowest: dict[int, float] = defaultdict(float)
    refused: list[str] = []

    def come_in_everywhere() -> None:
        for port in [shown, *ours]:
            began = time.monotonic()
            try:
                if again := come_in(port, secret) if port != shown else read_metrics(port):
                    refused.append(f"{port}: nobody listened for a moment, tried again {again} times")
            except OSError as error:
                refused.append(f"{port}: {error!r}, after {time.monotonic() - began:.3f} s")
            slowest[port] = max(slowest[port], time.monotonic() - began)

    agents, began, rounds = [agent.pid for agent in running.agents], time.monotonic(), 0
    with crowd.around(agents, each=each, seconds=LONGEST_S, times=times) as strangers:
        for generation, share in ((1, 0.5), (2, 1.0)):
            there = crowd.ports_of(running.processes())  # each generation has new ports of gloo
            while (
                min(strangers.came(port) for port in there) < share * each or time.monotonic() < began + share * seconds
            ):
                come_in_everywhere()
                rounds += 1
            running.until("step", rank=1, step=generation * STEPS - 1)
            os.kill(running.until("worker_started", rank=0, generation=generation)["pid"], signal.SIGKILL)
            running.until("restored", rank=0, generation=generation + 1)
            come_in_everywhere()
            after = {pid: mib(pid) for pid in before}
        report = running.wait()
    print(f"{rounds} rounds of honest peers at {len(ours) + 1} ports in {time.monotonic() - began:.0f} s")
    print("\n".join([f"refused: {len(refused)}", *refused[:20]]))
    print(f"slowest of each port {dict(slowest)}; MiB {before}, then {after}; {strangers}")
    assert (report["state"], report["steps_lost"]) == ("succeeded", 0), report["error"]
    assert refused == []
    assert [fault["rank"] for fault in report["faults"]] == [0, 0], report["faults"]
    assert {step: report["losses"][step] for step in undisturbed["losses"]} == undisturbed["losses"]
    assert {pid: after[pid] - before[pid] for pid in after if after[pid] > before[pid] + MOST_MIB} == {}
