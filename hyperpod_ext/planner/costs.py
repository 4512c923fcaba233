"""What each tier costs one node: seconds of training, seconds until a copy is safe, bytes of memory.

The constants are what this project measured on CPUs, or assumes of AWS; every one can be given instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance
from hyperpod_ext.config.checkpoint import CheckpointPolicy

_FLOW_BYTES_S = 5e9 / 8
"""One TCP connection between two EC2 instances, which AWS limits to 5 Gb/s outside of placement groups."""
_NETWORK = re.compile(r"([\d.]+)\s*(Gigabit|Gbps)", re.IGNORECASE)
_OVERLAPPED = 0.1
"""Of the time of a copy, what training loses when it goes on beside it (measured: 0.09 to 0.13)."""
_SLOWDOWN = 0.02
"""How much longer steps take while a copy is sent to a peer or written to S3 (measured: 0.00 to 0.04)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second, of one node where nothing else is said."""

    copy: float = 10e9
    """Of one worker, from the live tensors into shared memory."""
    peer: float = 2 * _FLOW_BYTES_S
    """To the memory of another node, all connections together."""
    durable: float = 1e9
    """To S3 or a shared directory."""
    disk: float = 2e9
    """To the node's own disk."""
    durable_total: float = 100e9
    """Of all nodes together, to and from there."""
    slowdown: float = _SLOWDOWN
    """How much longer steps take while a copy is sent or written, as a share."""
    source: str = "assumed; give measured ones with --copy-gbs, --peer-gbs and --durable-gbs"

    def __post_init__(self) -> None:
        for name in ("copy", "peer", "durable", "disk", "durable_total"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} bytes per second; it must be above 0")


def catalogued(machine: Instance | None, policy: CheckpointPolicy) -> Speeds:
    """Speeds of this type of machine, as far as its network tells; TCP does not go over EFA."""
    peer = policy.peer()
    streams = peer.streams if peer is not None else 2
    found = _NETWORK.search(machine.network or "") if machine is not None else None
    if machine is None or found is None:
        return Speeds(peer=streams * _FLOW_BYTES_S)
    network = float(found.group(1)) * 1e9 / 8
    source = f"network of {machine.name} ({machine.network}), {streams} connections of 5 Gb/s; the rest is assumed"
    return Speeds(peer=min(network, streams * _FLOW_BYTES_S), durable=min(network, 1e9), source=source)


@dataclass(frozen=True, slots=True)
class Spread:
    """How one copy of the state lies on nodes."""

    state_bytes: int
    """One whole copy of it."""
    nodes: int
    workers_per_node: int
    ranks_per_copy: int
    """Ranks that hold one copy together: all of them (FSDP), those of one shard group (HSDP), one (DDP)."""
    trained: float = 1.0
    """Share of its bytes that training changes. The rest, as the base model of LoRA, is copied to memory and to a peer
    once, and to a durable tier each time."""

    def __post_init__(self) -> None:
        if not 0 < self.trained <= 1:
            raise ValueError(f"a share of {self.trained} of the state is trained; it must be above 0, and 1 at most")
        world = self.nodes * self.workers_per_node
        if not 1 <= self.ranks_per_copy <= world or world % self.ranks_per_copy:
            raise ValueError(f"one copy on {self.ranks_per_copy} ranks does not fit a world of {world} evenly")

    @property
    def redundant(self) -> bool:
        """Whether another node holds the same state, live."""
        return self.nodes > 1 and 2 * self.ranks_per_copy <= self.nodes * self.workers_per_node

    @property
    def node_bytes(self) -> float:
        """What the workers of one node hold."""
        return self.state_bytes / self.ranks_per_copy * self.workers_per_node

    @property
    def distinct_node_bytes(self) -> float:
        """What one node writes of a durable checkpoint: each part is written once."""
        return self.state_bytes / self.nodes


@dataclass(frozen=True, slots=True)
class TierCost:
    """What one save to one tier takes."""

    blocked_s: float
    """Taken from training."""
    latency_s: float
    """From the snapshot until it could be restored from."""
    read_s: float
    """To restore one node from it."""


def memory_cost(spread: Spread, speeds: Speeds, *, overlap: bool) -> TierCost:
    """Of a snapshot in the node's own memory."""
    read = spread.node_bytes / spread.workers_per_node / speeds.copy
    copy = read * spread.trained
    return TierCost(copy * (_OVERLAPPED if overlap else 1.0), copy, read)


def peer_cost(
    spread: Spread, speeds: Speeds, replicas: int, max_slowdown: float, parity: int | None = None
) -> TierCost:
    """Of copies in other nodes' memory, or of parity; nothing is sent where others hold the same state live."""
    if spread.redundant:
        return TierCost(0.0, 0.0, spread.node_bytes / speeds.peer)
    each = spread.node_bytes / speeds.peer
    if parity is not None:  # sent once, in parts; to rebuild it, as much is read from each other node of the group
        return TierCost(each * min(max_slowdown, speeds.slowdown), each, (group_size(spread.nodes, parity) - 1) * each)
    send = replicas * each * spread.trained
    return TierCost(send * min(max_slowdown, speeds.slowdown), send, each)


def group_size(nodes: int, parity: int) -> int:
    """Nodes of the largest group where each has `parity` nodes, and some more where it does not come out even."""
    return -(-nodes // max(1, nodes // parity))


def durable_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Of a checkpoint in S3 or a shared directory."""
    speed = min(speeds.durable, speeds.durable_total / spread.nodes)
    write = spread.distinct_node_bytes / speed
    return TierCost(write * speeds.slowdown, write, spread.node_bytes / speed)


def disk_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Of snapshots on each node's own disk, where each part of the state is written once a node."""
    write = min(spread.node_bytes, float(spread.state_bytes)) / speeds.disk
    return TierCost(write * speeds.slowdown, write, write)


def memory_per_node(spread: Spread, policy: CheckpointPolicy) -> float:
    """Bytes the memory tier takes on each node: slots of its own snapshots, and of the replicas it holds."""
    peer, slots = policy.peer(), 2
    slots += 2 * (peer is not None) + bool(policy.durable())
    held = 0.0
    if peer is not None and not spread.redundant:
        held = 2 * peer.replicas if peer.parity is None else 2 / (peer.parity - 1)
    return spread.node_bytes * (slots + held)
