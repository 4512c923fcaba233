"""A memory server as the process that it is in a job."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from waiting import until

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.processes import wait_readable
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE
from hyperpod_ext.runtime.memory_server.client.client import Mapping, MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.request import Request
from hyperpod_ext.runtime.memory_server.protocol.requests import REQUESTS
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan

SECRET = b"0123456789abcdef0123456789abcdef"
JOB = "j"


@dataclass(frozen=True)
class Served:
    """One node's memory server."""

    path: Path
    pid: int
    clients: list[MemoryClient] = field(default_factory=list)

    def client(self) -> MemoryClient:
        """A connection of its own."""
        self.clients.append(MemoryClient(str(self.path)))
        return self.clients[-1]

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request on a connection of its own, by its name, and its answer as JSON has it."""
        client = MemoryClient(str(self.path))
        try:
            return json.loads(json.dumps(encode(client.ask(request(op, **fields)))))
        finally:
            client.close()

    def held_steps(self, owner: int = 0) -> list[int]:
        """Steps of this rank's whole snapshots, once all that dead processes of the rank had asked for is done."""
        snapshots = self.ask("held", owner=owner, pid=os.getpid())["snapshots"]
        return sorted(snapshot["step"] for snapshot in snapshots if snapshot["rank"] == owner)

    def kill(self) -> None:
        """kill -9, if it has not been already."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        with suppress(ProcessLookupError):  # it was dead, and has been waited for this moment
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait_readable(handle)
        os.close(handle)


def request(op: str, **fields: Any) -> Request[Any]:
    """A declared request, by its name."""
    return REQUESTS.decode({"op": op, **fields})


def plan_of(nbytes: int) -> Plan:
    """The plan of an image of one tensor of bytes, without the archive around it."""
    return Plan(["{", ("t",), "T"], (Item(0, "t", "uint8", (nbytes,), (0,), (nbytes,), 0, 0, nbytes, nbytes),), nbytes)


class Writer:
    """A rank's process, as far as the server sees it."""

    def __init__(self, server: Served, owner: int = 0, nbytes: int = 1000, world_size: int = 1) -> None:
        self.client, self.owner, self.nbytes, self.world_size = server.client(), owner, nbytes, world_size
        self.plan = plan_of(nbytes)
        self.mapping: Mapping = self.client.map(owner, nbytes)
        self.client.add_plan(self.plan)

    def begin(self, step: int, generation: int = 1, when_busy: str = "wait") -> int | None:
        return self.client.begin(self.owner, step, f"g{generation}-s{step}", generation, when_busy)

    def fill(self, slot: int, byte: int, share: float = 1.0) -> None:
        start, nbytes = slot * self.mapping.slot_bytes, int(self.nbytes * share)
        self.mapping.memory[start : start + nbytes] = bytes([byte]) * nbytes

    def seal(self, slot: int, step: int, generation: int = 1) -> None:
        record = {"save_id": f"g{generation}-s{step}", "world_size": self.world_size, "own_digest": "", "extras": {}}
        values = {"plan": self.plan.digest, "nbytes": self.nbytes, "values": [step], "saved_at": 0.0}
        self.client.seal(self.owner, slot, record | values)

    def save(self, step: int, generation: int = 1, when_busy: str = "wait") -> bool:
        """A whole save, its bytes all of the step's number; False when it was skipped."""
        slot = self.begin(step, generation, when_busy)
        if slot is None:
            return False
        self.fill(slot, step)
        self.seal(slot, step, generation)
        self.client.flush()
        return True


def environ_of(folder: Path, *tiers: dict[str, Any], nodes: int = 1, workers: int = 1, **policy: Any) -> dict[str, str]:
    """What a server of a job with these tiers is told. Its secret is in `folder`."""
    folder.mkdir(exist_ok=True)
    (secret := folder / "secret").touch(mode=0o600)
    secret.write_bytes(SECRET)
    checkpoint = {"tiers": tiers, **policy}
    config = RuntimeConfig.model_validate(
        {"name": JOB, "nodes": nodes, "workers_per_node": workers, "checkpoint": checkpoint}
    )
    return {**os.environ, ENV_RUNTIME: config.model_dump_json(exclude_unset=True), ENV_SECRET_FILE: str(secret)}


@contextmanager
def serve(
    folder: Path,
    *tiers: dict[str, Any],
    node: int = 0,
    nodes: int = 1,
    workers: int = 1,
    env: dict[str, str] | None = None,
    **policy: Any,
) -> Iterator[Served]:
    """A running server that keeps its socket and its secret in `folder`."""
    environ = environ_of(folder, *tiers, nodes=nodes, workers=workers, **policy) | (env or {})
    path = folder / f"node{node}.memory"
    arguments = ["--socket", str(path), "--node", str(node), "--parent", str(warm.parent_of(warm.LIGHT))]
    process = warm.start(warm.MEMORY_SERVER, arguments, env=environ, modules=warm.LIGHT)
    served = Served(path, process.pid)
    try:
        until(lambda: answers(path) or os.kill(served.pid, 0))  # the latter raises when it has ended
        yield served
    finally:
        for client in served.clients:
            client.close()
        served.kill()
        process.wait()
        path.unlink(missing_ok=True)


def answers(path: Path) -> bool:
    """Whether a server takes connections there: its path is seen a moment before it does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return path.exists() and probe.connect_ex(str(path)) == 0
