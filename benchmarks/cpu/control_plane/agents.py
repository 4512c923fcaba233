"""Agents that are only their messages: they say what real ones would, at once, and count what goes over the wire."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, encode, with_version
from hyperpod_ext.runtime.ipc.gathered import node_join
from hyperpod_ext.runtime.membership.job_state_changes import changed

_KIND = re.compile(rb'"type":"(\w+)"')
_HEAD_BYTES = 4096
"""Longer messages are not decoded: the agents' work would keep the coordinator from its core."""
STEP = 5
"""The step that every rank has made when a fault comes."""


@dataclass(slots=True)
class Traffic:
    """What went between the coordinator and all agents, both ways."""

    messages: int = 0
    nbytes: int = 0
    by_kind: dict[str, list[int]] = field(default_factory=dict)
    """Messages and bytes of each kind."""

    def count(self, kind: str, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes
        of_kind = self.by_kind.setdefault(kind, [0, 0])
        of_kind[0] += 1
        of_kind[1] += nbytes


class Agent:
    """One node's agent."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self.node = cluster, node
        self.ranks: list[int] = []
        self.generation = 1
        self.heard_of_state: list[bytes] = []
        """The job state as it came last, and changes of it since; of the first node after the coordinator's alone."""
        self._number = 0
        self._reading: asyncio.Task[None] | None = None

    async def come(self, port: int, secret: bytes, *, trains: bool = False) -> None:
        """Reach the coordinator, as a real one does; `trains`: again, or another one, with ranks that make steps."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        await wire.join_peer(self._reader, self._writer, secret)
        self._send(with_version(encode(self.handshake(trains=trains))))
        self._reading = asyncio.create_task(self._read())

    def hang_up(self) -> None:
        self._writer.transport.abort()
        if self._reading is not None:
            self._reading.cancel()

    def say(self, report: Declared) -> None:
        self._send(encode(report))

    def _send(self, message: wire.Message) -> None:
        frame = wire.encode(message)
        self._cluster.traffic.count(str(message["type"]), len(frame))
        self._writer.write(frame)

    def handshake(self, *, trains: bool, job_state: wire.Message | None = None) -> c.AgentHandshake:
        workers = {rank: c.RunningWorker(pid=2000 + rank, step=STEP, joining=False) for rank in self.ranks}
        return c.AgentHandshake(
            node=self.node,
            id=f"{self.node:016x}",
            pid=1000 + self.node,
            peer=(f"10.0.{self.node // 250}.{self.node % 250 + 1}", 40000),
            address=(f"10.0.{self.node // 250}.{self.node % 250 + 1}", 41000),
            domain=f"rack {self.node // 16}",
            generation=self.generation,
            workers=workers if trains else {},
            committed=STEP if trains else 0,
            exited={},
            job_state=job_state,
            term=int(trains),
        )

    def job_state(self) -> wire.Message:
        """What another coordinator needs, as this node has it."""
        first, *later = (json.loads(body) for body in self.heard_of_state)
        state: wire.Message = first["job_state"]
        for each in later:
            state = {**changed(state, each["changes"]), "number": each["number"]}
        return state

    async def _read(self) -> None:
        while True:
            header = await self._reader.readexactly(4)
            body = await self._reader.readexactly(wire.body_length(header))
            kind = _KIND.search(body)
            assert kind is not None
            self._cluster.traffic.count(kind[1].decode(), 4 + len(body))
            if self.node == 1 and kind[1] in (b"job_state", b"job_state_change"):
                self.heard_of_state = [*([] if kind[1] == b"job_state" else self.heard_of_state), body]
            self._hear(kind[1].decode(), json.loads(body) if len(body) < _HEAD_BYTES else {})

    def _hear(self, kind: str, order: dict[str, Any]) -> None:
        match kind:
            case "job_state" | "job_state_change":
                self._acknowledge(order)
            case "start_worker":
                self.ranks.append(order["rank"])
                if len(self.ranks) == self._cluster.workers_per_node:
                    self._join(live=False)
            case "abort":
                self.generation = order["generation"]
                self._cluster.count("abort", self.generation)
                self._join(live=True)
            case "begin":
                if self.ranks:
                    ranks = tuple(self.ranks)
                    self.say(c.Restored(generation=self.generation, rank=ranks[0], attempt=1, error="", ranks=ranks))
            case "go":
                self._cluster.count("go", self.generation)
            case "stop":
                raise AssertionError(f"node {self.node} was told to stop: {order['why']}")

    def _acknowledge(self, order: dict[str, Any]) -> None:
        # of a long one only the count is known; each agent has heard of all so far
        self._number = order.get("number") or self._number + 1
        self.say(c.Acknowledged(number=self._number))

    def _join(self, *, live: bool) -> None:
        if not self.ranks:
            return
        held = self._held() if live else ()
        has = c.LiveState(step=STEP, save_id=f"g1-s{STEP}", own_digest="0" * 32, sharing="same") if live else None
        joins = {rank: c.Join(rank=rank, pid=2000 + rank, live=has, store_port=50000) for rank in self.ranks}
        self.say(node_join(joins, held, self.generation))

    def _held(self) -> tuple[c.HeldSnapshot, ...]:
        """Two steps of each rank here, and a replica of another node's for each."""
        each, ranks = self._cluster.workers_per_node, self._cluster.workers_per_node * self._cluster.nodes
        own = [(rank, step, False) for rank in self.ranks for step in (STEP - 1, STEP)]
        replicas = [((rank + each) % ranks, STEP - 1, True) for rank in self.ranks]
        return tuple(
            c.HeldSnapshot(
                rank=rank,
                step=step,
                generation=1,
                save_id=f"g1-s{step}",
                world_size=ranks,
                own_digest="0" * 32,
                sharing="same",
                content=f"{step:032x}",
                replica=replica,
            )
            for rank, step, replica in own + replicas
        )

    def step(self) -> None:
        """Each rank has begun its loop, and made a step."""
        for event, made in (("begun", STEP - 1), ("step", STEP)):
            fields = {"step": made, "sharing": "same"} if event == "begun" else {"step": made, "began": 1.0}
            for rank in self.ranks:
                self.say(c.Event(generation=self.generation, rank=rank, event=event, t=2.0, fields=fields))


class Cluster:
    """All agents of a job."""

    def __init__(self, nodes: int, spares: int, workers_per_node: int) -> None:
        self.nodes, self.workers_per_node = nodes, workers_per_node
        self.traffic = Traffic()
        self.agents = [Agent(self, node) for node in range(nodes + spares)]
        self._heard: Counter[tuple[str, int]] = Counter()
        """How many agents have heard an order of a generation."""
        self._waiter: tuple[Callable[[], bool], asyncio.Future[None]] | None = None

    def count(self, order: str, generation: int) -> None:
        self._heard[order, generation] += 1
        if self._waiter is not None and self._waiter[0]() and not self._waiter[1].done():
            self._waiter[1].set_result(None)

    async def all_hear(self, order: str, generation: int, agents: int, limit_s: float) -> None:
        """Wait until so many agents have heard an order of a generation."""

        def enough() -> bool:
            return self._heard[order, generation] >= agents

        if not enough():
            self._waiter = (enough, asyncio.get_running_loop().create_future())
            async with asyncio.timeout(limit_s):
                await self._waiter[1]
