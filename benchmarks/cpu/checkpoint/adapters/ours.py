"""hyperpod_ext: a Checkpointer in each rank, and the memory server of its node, a process that outlives them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint.adapters import Adapter, Host, Place
from checkpoint.state import State
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.snapshot.tree import take_apart

JOB, SECRET = "bench", b"0123456789abcdef0123456789abcdef"
_DEADLINE_S = 120.0


def _config(place: Place) -> str:
    """Every snapshot goes to every tier there is; to peers, every second one."""
    tiers: list[dict[str, Any]] = [{"kind": "memory"}]
    nodes = place.world_size if place.replicas else 1
    if place.replicas:
        tiers.append({"kind": "peer", "every_steps": 2, "replicas": place.replicas})
    if place.sink:
        tiers.append({"kind": "s3", "uri": "s3://bench/checkpoints", "every_steps": 1})
    shape = {"name": JOB, "nodes": nodes, "workers_per_node": place.world_size // nodes}
    return json.dumps({**shape, "checkpoint": {"tiers": tiers}})


def _serve(place: Place, node: int) -> subprocess.Popen[bytes]:
    """One node's memory server, that of the agent."""
    secret = place.folder / "secret"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_bytes(SECRET)
    environ = os.environ | {"HPX_RUNTIME": _config(place), "HPX_SECRET_FILE": str(secret)}
    if place.sink:
        environ |= {"AWS_ENDPOINT_URL_S3": place.sink, "AWS_REGION": "us-east-1"}
        environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    path = _socket_of(place, node)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server", "--socket", str(path), "--node", str(node)]
    # a session of its own, as the agent gives it one: the kernel may share cores out by session
    process = subprocess.Popen([*command, "--parent", str(os.getpid())], env=environ, start_new_session=True)
    deadline = time.monotonic() + _DEADLINE_S
    while not _answers(path):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the memory server did not start")
        time.sleep(0.02)
    return process


def _socket_of(place: Place, node: int) -> Path:
    return place.folder / f"memory{node}"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _introduce(place: Place, nodes: int) -> dict[int, tuple[str, int]]:
    """Tell every node's server where the others are."""
    clients = [MemoryClient(str(_socket_of(place, node))) for node in range(nodes)]
    peers = {node: ("127.0.0.1", c.ask(r.Listen(host="127.0.0.1")).port) for node, c in enumerate(clients)}
    for client in clients:
        client.ask(r.Peers(peers=peers, domains=dict.fromkeys(peers, "")))
        client.close()
    return peers


class Ours(Adapter):
    _servers: dict[int, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextlib.contextmanager
    def hosting(cls, place: Place) -> Iterator[Host]:
        nodes = place.world_size if place.replicas else 1
        cls._servers = {node: _serve(place, node) for node in range(nodes)}
        if nodes > 1:
            _introduce(place, nodes)
        try:
            yield Host(pids=tuple(server.pid for server in cls._servers.values()))
        finally:
            for server in cls._servers.values():
                server.kill()
                server.wait()

    @classmethod
    def lose_memory_of(cls, place: Place, host: Host, rank: int) -> None:
        cls._servers[rank].send_signal(signal.SIGKILL)
        cls._servers[rank].wait()
        cls._servers[rank] = _serve(place, rank)
        _introduce(place, len(cls._servers))

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        socket_path = str(_socket_of(place, place.rank if place.replicas else 0))
        self._line = MemoryClient(socket_path)
        self._checkpointer = Checkpointer(
            MemoryClient(socket_path),
            place.rank,
            world_size=place.world_size,
            job=JOB,
            secret=SECRET,
            overlap=place.overlapped,
        )
        self._save_id = ""
        self._step = max((held["step"] for held in self._held()), default=0)

    def _held(self) -> list[dict[str, Any]]:
        return [held for held in self._line.ask(r.Held()).snapshots if held["rank"] == self.place.rank]

    def prepare(self, state: State) -> None:
        self._checkpointer.prepare(take_apart(state, torch.Tensor))

    def save(self, state: State, step: int) -> None:
        self.begin(state, step)
        self._checkpointer.wait_staged()

    def begin(self, state: State, step: int) -> None:
        self._save_id = f"g1-s{step}"
        self._checkpointer.save(step, self._save_id, 1, take_apart(state, torch.Tensor))

    def wait_staged(self) -> None:
        self._checkpointer.wait_staged()

    def stepped(self) -> None:
        if self.place.replicas:
            self._checkpointer.stepped()

    def busy(self) -> bool:
        if self._checkpointer.busy():
            return True
        wanted = "replicated" if self.place.replicas else "durable" if self.place.sink else "sealed"
        return not self._reached(wanted, 0.0)

    def _reached(self, state: str, timeout_s: float) -> bool:
        rank, save_id = self.place.rank, self._save_id
        return self._line.ask(r.WaitState(owner=rank, save_id=save_id, state=state, timeout_s=timeout_s)).reached

    def wait_sealed(self) -> None:
        if not self._reached("sealed", _DEADLINE_S):
            raise RuntimeError(f"{self._save_id} was not sealed")

    def wait_replicated(self) -> None:
        if not self._reached("replicated", _DEADLINE_S):
            raise RuntimeError(f"{self._save_id} was not replicated: {self._line.ask(r.Status()).copying}")

    def flush(self) -> None:
        self._checkpointer.flush()
        self._line.ask(r.WaitIdle(timeout_s=_DEADLINE_S))

    def restore(self, state: State) -> int:
        parts = take_apart(state, torch.Tensor)
        if own := self._held():
            newest = max(own, key=lambda held: held["step"])
            snapshot = self._checkpointer.load(self.place.rank, newest["save_id"])
        else:
            address, newest = self._find_replica()
            snapshot = self._checkpointer.read_peer(address, self.place.rank, newest["save_id"])
        self._checkpointer.restore(parts, [snapshot])
        return snapshot.step

    def _find_replica(self) -> tuple[tuple[str, int], dict[str, Any]]:
        found = []
        for node in range(self.place.world_size):
            if node != self.place.rank:
                other = MemoryClient(str(_socket_of(self.place, node)))
                address = ("127.0.0.1", other.ask(r.Listen(host="127.0.0.1")).port)
                _, replicas = PeerClient(*address, SECRET).held()
                found += [(address, held) for held in replicas if held["rank"] == self.place.rank]
        return max(found, key=lambda each: each[1]["step"])

    def drain(self) -> None:
        if not self._reached("durable", _DEADLINE_S):
            raise RuntimeError(f"{self._save_id} did not arrive: {self._line.ask(r.Status()).copying}")
