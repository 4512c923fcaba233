"""One node's part of the peer tier, small: regions, a peer server and a replicator, over real sockets.

`python peer_node.py tcp` is such a node as a process of its own; it prints its port and serves until it is killed.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.config.checkpoint import PeerTier
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.incoming_parts import IncomingParts
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlTransfer
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.replication.replicator import Replicator
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, crc64nvme, crc_text, save_id_of

SECRET = b"0123456789abcdef0123456789abcdef"
JOB = "j"
MIB = 1 << 20


def plan_of(nbytes: int) -> Plan:
    """An image without a tensor in it."""
    return Plan([], (), nbytes)


class Node:
    """Node `number` with room for `budget` bytes of snapshots."""

    def __init__(
        self,
        number: int,
        *,
        secret: bytes = SECRET,
        budget: int = 1 << 30,
        timeout_s: float = 10.0,
        slots: int = 4,
        encrypted: bool = False,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        **tier: Any,
    ) -> None:
        self.number, self.secret, self.encrypted, self.host = number, secret, encrypted, host
        whole = Budget(budget, lambda: 1 << 40)
        self.own = Regions(kind="own", job=JOB, secret=secret, budget=whole, slots=slots)
        self.replicas = Regions(kind="replica", job=JOB, secret=secret, budget=whole, slots=2)
        self.pieces = Regions(kind="parity", job=JOB, secret=secret, budget=whole, slots=2)
        self.plans = Plans()
        cpu_priority = CpuPriority(1.0)
        parts_timeout_s = tier.pop("parts_timeout_s", 60.0)
        self.parts = IncomingParts(self.pieces, cpu_priority, parts_timeout_s) if tier.get("parity") else None
        self.nixl = NixlTransfer(cpu_priority, environment) if tier.get("transport") == "nixl" else None
        self.server = PeerServer(
            self.own,
            self.replicas,
            self.plans,
            secret=secret,
            job=JOB,
            cpu_priority=cpu_priority,
            parts=self.parts,
            host=host,
            timeout_s=timeout_s,
            encrypted=encrypted,
            nixl=self.nixl,
        )
        self.server.start()
        when_busy = tier.pop("when_busy", "supersede")
        self.replicator = Replicator(
            self.own,
            self.plans.__getitem__,
            PeerTier(**{"every_steps": 1, **tier}),
            node=number,
            secret=secret,
            cpu_priority=cpu_priority,
            parts=self.parts,
            when_busy=when_busy,
            timeout_s=timeout_s,
            encrypted=encrypted,
            nixl=self.nixl,
        )

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.server.port

    def incoming(self) -> dict[int, Any]:
        """Replicas that are on their way to this node, by token."""
        return self.server._incoming._by_token

    def client(self, secret: bytes = SECRET) -> PeerClient:
        return PeerClient(*self.address, secret, encrypted=self.encrypted)

    def save(
        self,
        owner: int,
        step: int,
        data: bytes,
        generation: int = 1,
        when_busy: Any = "supersede",
        *,
        seal: bool = True,
        frozen: int = 0,
    ) -> Manifest:
        """What a memory server does for one save of one rank, or until that rank dies, or is late, before the end.

        `frozen`: bytes from the start that are of parameters that are not trained.
        """
        plan = plan_of(len(data))
        self.plans.add(plan.to_json(), plan.digest)
        region, fd = self.own.map(owner, len(data))
        os.close(fd)
        index = self.own.next_slot(owner, when_busy, timeout_s=20)
        assert index is not None
        self.replicator.stepped(owner)
        save_id = save_id_of(generation, step)
        self.own.begin(owner, index, step, save_id, generation)
        self.replicator.begun(owner, generation, step)
        if not seal:
            return {}
        region.view(index, len(data))[:] = data
        record = {"save_id": save_id, "nbytes": len(data), "plan": plan.digest, "values": [], "world_size": 1}
        if frozen:
            record["extras"] = {"frozen": [frozen, crc_text(crc64nvme(data[:frozen]))]}
        manifest = self.own.seal(owner, index, record)
        self.replicator.sealed(owner, manifest)
        return manifest

    def close(self) -> None:
        self.replicator.close()
        self.server.close()
        if self.nixl is not None:
            self.nixl.close()


def steps(regions: Regions, owner: int = 0) -> list[int]:
    """Steps of the whole snapshots of a rank."""
    return sorted(brief["step"] for brief in regions.held() if brief["rank"] == owner)


def content(nbytes: int, seed: int = 0) -> bytes:
    """Bytes in which every position matters."""
    return random.Random(seed).randbytes(nbytes)


def main() -> None:
    """A node with a transport that serves until it is killed. With a port, too: it replicates step 1 there, and then
    step 2 slowly."""
    transport, *port = sys.argv[1:]
    if not port:
        node = Node(1, transport=transport)
        print(node.server.port, flush=True)
    else:
        node = Node(0, transport=transport)
        node.replicator.set_peers({1: ("127.0.0.1", int(port[0]))})
        node.save(0, 1, content(8 * MIB, 1))
        assert node.replicator.wait_idle(20)
        node.replicator.rate_limit.rate = 8 * MIB
        node.save(0, 2, content(32 * MIB, 2))
    threading.Event().wait()


if __name__ == "__main__":
    main()
