"""Costs of each tier for one node: seconds of training, seconds until a copy is safe, bytes of memory.

The constants were measured on CPUs, or are assumed for AWS; options replace them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance
from hyperpod_ext.config.checkpoint import CheckpointPolicy

_FLOW_BYTES_S = 5e9 / 8
"""Bytes a second of one TCP connection between EC2 instances: AWS limits it to 5 Gb/s without placement groups."""
_NETWORK = re.compile(r"([\d.]+)\s*(Gigabit|Gbps)", re.IGNORECASE)
_OVERLAPPED = 0.1
"""Share of a copy's time that training loses if the two overlap (measured: 0.09 to 0.13)."""
_SLOWDOWN = 0.02
"""Relative slowdown of steps while a copy is sent to a peer or written to S3 (measured: 0.00 to 0.04)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second, of one node unless stated otherwise."""

    copy: float = 10e9
    """Copy of one worker from live tensors into shared memory."""
    peer: float = 2 * _FLOW_BYTES_S
    """From one node to another node's memory, over all connections."""
    durable: float = 1e9
    """From one node to S3 or a shared directory."""
    disk: float = 2e9
    """From one node to its own disk."""
    durable_total: float = 100e9
    """All nodes in total, to and from S3 or a shared directory."""
    slowdown: float = _SLOWDOWN
    """Relative slowdown of steps while a copy is sent or written."""
    source: str = "assumed; set measured values with --copy-gbs, --peer-gbs and --durable-gbs"

    def __post_init__(self) -> None:
        for name in ("copy", "peer", "durable", "disk", "durable_total"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} bytes per second must be above 0")


def catalogued(machine: Instance | None, policy: CheckpointPolicy) -> Speeds:
    """Return the speeds of a machine, derived from its network. TCP does not use EFA."""
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
    """Distribution of the state over nodes."""

    state_bytes: int
    """Bytes of one copy of the state."""
    nodes: int
    workers_per_node: int
    ranks_per_copy: int
    """Ranks that share one copy: all (FSDP), one shard group (HSDP), or one rank (DDP)."""
    trained: float = 1.0
    """Share of the state's bytes that training changes. The rest, such as the base model of LoRA, is sent to each tier
    once, unless peers keep parity."""

    def __post_init__(self) -> None:
        if not 0 < self.trained <= 1:
            raise ValueError(
                f"a share of {self.trained} of the state is trained, but the share must be above 0 and at most 1"
            )
        world = self.nodes * self.workers_per_node
        if not 1 <= self.ranks_per_copy <= world or world % self.ranks_per_copy:
            raise ValueError(f"one copy on {self.ranks_per_copy} ranks does not divide a world of {world} evenly")

    @property
    def redundant(self) -> bool:
        """Return whether another node has the same live state."""
        return self.nodes > 1 and 2 * self.ranks_per_copy <= self.nodes * self.workers_per_node

    @property
    def node_bytes(self) -> float:
        """Return the bytes of state on one node."""
        return self.state_bytes / self.ranks_per_copy * self.workers_per_node

    @property
    def distinct_node_bytes(self) -> float:
        """Bytes of a durable checkpoint that one node writes after its first one: each part is written once."""
        return self.state_bytes * self.trained / self.nodes


@dataclass(frozen=True, slots=True)
class TierCost:
    """Costs of one save to one tier, in seconds."""

    blocked_s: float
    """Training time that the save takes."""
    latency_s: float
    """Seconds from the snapshot until the copy can be restored."""
    read_s: float
    """Seconds to restore one node."""


def memory_cost(spread: Spread, speeds: Speeds, *, overlap: bool) -> TierCost:
    """Return the cost of a snapshot in the node's own memory."""
    read = spread.node_bytes / spread.workers_per_node / speeds.copy
    copy = read * spread.trained
    return TierCost(copy * (_OVERLAPPED if overlap else 1.0), copy, read)


def peer_cost(
    spread: Spread, speeds: Speeds, replicas: int, max_slowdown: float, parity: int | None = None
) -> TierCost:
    """Return the cost of copies or parity in other nodes' memory. Nothing is sent if the state is redundant."""
    if spread.redundant:
        return TierCost(0.0, 0.0, spread.node_bytes / speeds.peer)
    each = spread.node_bytes / speeds.peer
    if parity is not None:
        # a node sends its snapshot once, in parts; a rebuild reads as much from each other node of the group
        return TierCost(each * min(max_slowdown, speeds.slowdown), each, (group_size(spread.nodes, parity) - 1) * each)
    send = replicas * each * spread.trained
    return TierCost(send * min(max_slowdown, speeds.slowdown), send, each)


def group_size(nodes: int, parity: int) -> int:
    """Return the nodes of the largest parity group: `parity`, and more if the nodes do not divide evenly."""
    return -(-nodes // max(1, nodes // parity))


def durable_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Return the cost of a checkpoint in S3 or a shared directory."""
    speed = min(speeds.durable, speeds.durable_total / spread.nodes)
    write = spread.distinct_node_bytes / speed
    return TierCost(write * speeds.slowdown, write, spread.node_bytes / speed)


def disk_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Return the cost of snapshots on each node's own disk. Each node writes each part of its state once."""
    read = min(spread.node_bytes, float(spread.state_bytes)) / speeds.disk
    write = read * spread.trained
    return TierCost(write * speeds.slowdown, write, read)


def memory_per_node(spread: Spread, policy: CheckpointPolicy) -> float:
    """Return the bytes of the memory tier on each node: slots of its own snapshots and of replicas."""
    peer, slots = policy.peer(), 2
    slots += 2 * (peer is not None) + bool(policy.durable())
    held = 0.0
    if peer is not None and not spread.redundant:
        held = 2 * peer.replicas if peer.parity is None else 2 / (peer.parity - 1)
    return spread.node_bytes * (slots + held)
