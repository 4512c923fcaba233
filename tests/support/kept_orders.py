"""A coordinator whose agents are only what it has sent them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.coordinator.members import Agent
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire


class Sent:
    """In the place of a connection: keeps what is written."""

    def __init__(self) -> None:
        self.orders: list[c.ToAgent] = []
        self.transport, self.closed = self, False

    def write(self, frame: bytes) -> None:
        self.orders.append(c.AGENT_ORDERS.decode(wire.decode(frame[4:])))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[Any]) -> list[Any]:
        """What was sent of one kind."""
        return [order for order in self.orders if isinstance(order, kind)]


def handshake_of(node: int, **said: Any) -> c.AgentHandshake:
    known: dict[str, Any] = {
        "id": f"agent {node}",
        "pid": 1,
        "peer": ("10.0.0.1", 1 + node),
        "address": ("10.0.0.2", 1 + node),
        "domain": "",
        "generation": 1,
        "committed": 0,
        "workers": {},
        "exited": {},
        "job_state": None,
    }
    return c.AgentHandshake(node=node, **{**known, **said})


def come(coordinator: Coordinator, handshake: c.AgentHandshake) -> Sent:
    """An agent is let in."""
    line: Any = Sent()
    coordinator.admission.welcome(handshake.node, handshake, Agent(line, time.monotonic()))
    return line


@contextlib.asynccontextmanager
async def begun(config: RuntimeConfig, folder: Path) -> AsyncIterator[tuple[Coordinator, dict[int, Sent]]]:
    """The coordinator of a job that all nodes and spares have come to, with what each was sent."""
    coordinator = Coordinator.first(config, 0, folder, 1)
    try:
        # those without which the job does not begin come last
        nodes = reversed(range(config.nodes + config.spares))
        yield coordinator, {node: come(coordinator, handshake_of(node)) for node in nodes}
    finally:
        coordinator.stop()


def take(coordinator: Coordinator, node: int, report: c.FromAgent) -> None:
    """The agent of `node` says something."""
    coordinator.take(node, coordinator.members.agents[node], report)


def join(coordinator: Coordinator, *ranks: int) -> None:
    """Ranks wait for the generation that forms."""
    membership = coordinator.membership
    for rank in ranks or sorted(membership.nodes):
        said = c.Join(rank=rank, pid=1, live=None, store_port=1, generation=membership.generation)
        take(coordinator, membership.nodes[rank], said)


def train(coordinator: Coordinator) -> None:
    """All ranks join, restore and train."""
    join(coordinator)
    membership = coordinator.membership
    generation, attempt = membership.generation, membership.attempt
    for rank, node in sorted(membership.nodes.items()):
        take(coordinator, node, c.Restored(rank=rank, generation=generation, attempt=attempt, error=""))
