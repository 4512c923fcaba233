"""Costs of each checkpoint tier for one node: lost training time, seconds until a copy is safe, and bytes of memory.

The constants were measured on CPUs, or are assumptions about AWS. Options of `hp-ext plan` replace the constants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance
from hyperpod_ext.config.checkpoint import CheckpointPolicy

_FLOW_BYTES_S = 5e9 / 8
"""Bytes per second of one TCP connection between EC2 instances. AWS limits a connection outside a placement group to
5 Gb/s."""
_NETWORK = re.compile(r"([\d.]+)\s*(Gigabit|Gbps)", re.IGNORECASE)
_OVERLAPPED = 0.1
"""Share of a copy's duration by which training is delayed if the copy overlaps with training (measured: 0.09 to
0.13)."""
_SLOWDOWN = 0.02
"""Relative slowdown of training steps while a copy is sent to another node or written to S3 (measured: 0.00 to
0.04)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of copies in bytes per second."""

    copy: float = 10e9
    """Bytes per second that one worker copies from its live tensors into shared memory."""
    peer: float = 2 * _FLOW_BYTES_S
    """Bytes per second from one node to another node's memory, over all TCP connections together."""
    durable: float = 1e9
    """Bytes per second from one node to S3 or a shared directory."""
    disk: float = 2e9
    """Bytes per second from one node to its own disk."""
    durable_total: float = 100e9
    """Bytes per second of all nodes together, to or from S3 or a shared directory."""
    slowdown: float = _SLOWDOWN
    """Relative slowdown of training steps while a copy is sent or written: 0.02 is 2 %."""
    source: str = "assumed; set measured values with --copy-gbs, --peer-gbs and --durable-gbs"

    def __post_init__(self) -> None:
        for name in ("copy", "peer", "durable", "disk", "durable_total"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} bytes per second must be above 0")


def catalogued(machine: Instance | None, policy: CheckpointPolicy) -> Speeds:
    """Return the speeds of copies for a machine, from its network bandwidth and the number of TCP connections. EFA does
    not make copies faster, because copies use TCP, and TCP does not use EFA."""
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
    """Distribution of the training state over the nodes of a job."""

    state_bytes: int
    """Bytes of one copy of the training state."""
    nodes: int
    workers_per_node: int
    ranks_per_copy: int
    """Number of ranks that together hold one copy of the state: all ranks with FSDP, the size of a shard group with
    HSDP, 1 with DDP."""
    trained: float = 1.0
    """Share of the state's bytes that training changes, from 0 to 1. Bytes that training does not change, such as the
    base model of LoRA, are sent to each tier only once, unless the peer tier uses parity."""

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
        """Bytes that one node writes for each durable checkpoint after the first one. Each part of the state is written
        by only one node."""
        return self.state_bytes * self.trained / self.nodes


@dataclass(frozen=True, slots=True)
class TierCost:
    """Costs of one save to one tier, in seconds."""

    blocked_s: float
    """Seconds by which one save delays training."""
    latency_s: float
    """Seconds from the snapshot until its copy in this tier can be restored."""
    read_s: float
    """Seconds to restore the state of one node from this tier."""


def memory_cost(spread: Spread, speeds: Speeds, *, overlap: bool) -> TierCost:
    """Return the cost of a snapshot in the node's own memory."""
    read = spread.node_bytes / spread.workers_per_node / speeds.copy
    copy = read * spread.trained
    return TierCost(copy * (_OVERLAPPED if overlap else 1.0), copy, read)


def peer_cost(
    spread: Spread, speeds: Speeds, replicas: int, max_slowdown: float, parity: int | None = None
) -> TierCost:
    """Return the cost of copies or parity data in other nodes' memory. If the state is redundant, nothing is sent,
    because another node holds the same live state."""
    if spread.redundant:
        return TierCost(0.0, 0.0, spread.node_bytes / speeds.peer)
    each = spread.node_bytes / speeds.peer
    if parity is not None:
        # each node sends its whole snapshot once, split among several nodes; rebuilding a lost node's state reads as
        # many bytes from each other node of the group
        return TierCost(each * min(max_slowdown, speeds.slowdown), each, (group_size(spread.nodes, parity) - 1) * each)
    send = replicas * each * spread.trained
    return TierCost(send * min(max_slowdown, speeds.slowdown), send, each)


def group_size(nodes: int, parity: int) -> int:
    """Return the number of nodes in the largest parity group. The number is larger than `parity` if `nodes` is no
    multiple of `parity`."""
    return -(-nodes // max(1, nodes // parity))


def durable_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Return the cost of a checkpoint in S3 or a shared directory."""
    speed = min(speeds.durable, speeds.durable_total / spread.nodes)
    write = spread.distinct_node_bytes / speed
    return TierCost(write * speeds.slowdown, write, spread.node_bytes / speed)


def disk_cost(spread: Spread, speeds: Speeds) -> TierCost:
    """Return the cost of snapshots on each node's own disk. A node writes each part of its state once, even if several
    of its workers hold the part."""
    read = min(spread.node_bytes, float(spread.state_bytes)) / speeds.disk
    write = read * spread.trained
    return TierCost(write * speeds.slowdown, write, read)


def memory_per_node(spread: Spread, policy: CheckpointPolicy) -> float:
    """Return the bytes that the memory tier needs on each node, for the node's own snapshots and for replicas or parity
    of other nodes' snapshots."""
    peer, slots = policy.peer(), 2
    slots += 2 * (peer is not None) + bool(policy.durable())
    held = 0.0
    if peer is not None and not spread.redundant:
        held = 2 * peer.replicas if peer.parity is None else 2 / (peer.parity - 1)
    return spread.node_bytes * (slots + held)
