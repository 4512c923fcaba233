"""Ranks that are only their part of the store: many in one process, each with its server, its lines and its agent.

A program: it is told what to do in lines of JSON, and answers with what that has cost.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hyperpod_ext.runtime.coordinator.job_run import Ranks
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.process_group.address_book import Address, AddressBook, LookedUp, NodeAddressBook
from hyperpod_ext.runtime.process_group.store import Endpoint, PartitionedStore
from rank_store.pattern import VALUE, Group, Mesh, default_group, mesh_groups

SECRET = b"0123456789abcdef"
_TCP_INFO_BYTES, _RECEIVED_AT, _SENT_AT = 208, 128, 200
"""Of `struct tcp_info`, from Linux 4.19 on: two counts of bytes."""


@dataclass(slots=True)
class LookUps:
    """Questions for addresses, since they were counted before."""

    worker_look_ups: int = 0
    """Of workers, to their agents."""
    agent_look_ups: int = 0
    """Of agents, to the coordinator."""
    look_up_bytes: int = 0
    """Of those of agents, and of the coordinator's answers."""

    def take(self) -> dict[str, int]:
        found = asdict(self)
        self.worker_look_ups = self.agent_look_ups = self.look_up_bytes = 0
        return found


class Node:
    """An agent's part: what its workers look up, asked of the coordinator."""

    def __init__(self, ranks: range, coordinator: Ranks, counted: LookUps) -> None:
        self.ranks, self._coordinator, self._counted = ranks, coordinator, counted
        number = ranks.start // len(ranks)
        self.host = f"127.1.{number // 250}.{number % 250 + 1}"
        """Of one address, the ports do not do for all ranks and their connections."""
        self._book = NodeAddressBook(len(ranks), self._ask)
        self.workers: list[Owner] = []

    def begin(self, generation: int, follows: int, addresses: dict[int, Address]) -> None:
        for book in (self._book, *(worker.book for worker in self.workers)):
            book.begin(generation, follows, addresses)

    def look_up(self, worker: Owner, rank: int) -> None:
        self._counted.worker_look_ups += 1
        worker.book.add(self._book.generation, self._book.look_up([rank]))

    def _ask(self, generation: int, ranks: tuple[int, ...]) -> None:
        answer = c.Addresses(generation=generation, addresses=self._coordinator.addresses_of(ranks))
        request = c.LookUp(generation=generation, ranks=ranks)
        self._counted.agent_look_ups += 1
        self._counted.look_up_bytes += sum(len(wire.encode(encode(message))) for message in (request, answer))
        for book in (self._book, *(worker.book for worker in self.workers)):
            book.add(generation, answer.addresses)


class Owner:
    """One rank's part of the store."""

    def __init__(self, rank: int, world_size: int, mesh: Mesh, node: Node) -> None:
        self.rank, self._world_size, self._node = rank, world_size, node
        self.groups = {"default": [default_group(rank, world_size)], "mesh": mesh_groups(rank, mesh)}
        self.book = AddressBook()
        self.endpoint = Endpoint(rank, SECRET, _broken, node.host)
        self.store: PartitionedStore | None = None

    def open(self, generation: int) -> None:
        addresses = LookedUp(self.book, self._world_size, lambda rank: self._node.look_up(self, rank), lambda: False)
        self.store = self.endpoint.open(addresses, generation)
        self.store.set(f"backend/{self.rank}", "gloo")  # as `groups.py` does, for ranks of other backends

    def make(self, group: Group) -> None:
        assert self.store is not None
        if group.name:
            self.store.route(group.name, group.members)
        self.store.set(group.own_key, VALUE)

    def sum(self, group: Group) -> None:
        assert self.store is not None
        for key in group.neighbour_keys:
            self.store.wait([key])
            assert self.store.get(key) == VALUE

    def traffic(self) -> dict[socket.socket, int]:
        """Bytes that came and went on each line that others have to this rank."""
        found = {}
        for peer in list(self.endpoint._server._peers):
            info = peer.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            found[peer.socket] = sum(struct.unpack_from("Q", info, at)[0] for at in (_RECEIVED_AT, _SENT_AT))
        return found


@dataclass(slots=True)
class Owners:
    """Those of one process."""

    first: int
    count: int
    world_size: int
    workers_per_node: int
    mesh: Mesh
    coordinator: Ranks = field(default_factory=Ranks)
    look_ups: LookUps = field(default_factory=LookUps)
    nodes: list[Node] = field(default_factory=list)
    generation: int = 0
    _lines: dict[socket.socket, int] = field(default_factory=dict)
    _requests: dict[Endpoint, int] = field(default_factory=dict)
    _cpu_s: float = 0.0

    def start(self) -> dict[int, Address]:
        """Addresses of all that are here."""
        each = self.workers_per_node
        for first in range(self.first, self.first + self.count, each):
            node = Node(range(first, first + each), self.coordinator, self.look_ups)
            self.nodes.append(node)
            self._fill(node)
        return self._addresses(self.nodes)

    def lose(self, first: int) -> dict[int, Address]:
        """The node of rank `first` is lost, and another has its ranks; their addresses, if it is here."""
        lost = [number for number, node in enumerate(self.nodes) if first in node.ranks]
        for number in lost:
            for owner in self.nodes[number].workers:
                owner.endpoint.close()
            self.nodes[number] = Node(self.nodes[number].ranks, self.coordinator, self.look_ups)
            self._fill(self.nodes[number])
        return self._addresses(self.nodes[number] for number in lost)

    def begin(self, addresses: dict[int, Address]) -> None:
        """All hear of the next generation as the coordinator tells it."""
        self.generation += 1
        self.coordinator.stores.update(addresses)
        follows, news = self.coordinator.news_of_stores(self.generation)
        for node in self.nodes:
            node.begin(self.generation, follows, news)

    def open(self) -> None:
        for owner in self._all():
            owner.open(self.generation)

    def make(self, which: str) -> None:
        for owner in self._all():
            for group in owner.groups[which]:
                owner.make(group)

    def sum(self, which: str) -> None:
        for owner in self._all():
            for group in owner.groups[which]:
                owner.sum(group)

    def cost(self) -> dict[str, float]:
        """Since it was asked before. Bytes on lines that have been closed since are not in it."""
        cpu_s = time.process_time() - self._cpu_s
        lines: dict[socket.socket, int] = {}
        for owner in self._all():
            lines |= owner.traffic()
        requests = {owner.endpoint: owner.endpoint.requests for owner in self._all()}
        served = [count - self._requests.get(endpoint, 0) for endpoint, count in requests.items()]
        nbytes = sum(count - self._lines.get(line, 0) for line, count in lines.items())
        self._lines, self._requests, self._cpu_s = lines, requests, time.process_time()
        counts = {"requests": sum(served), "busiest": max(served), "bytes": nbytes, "lines": len(lines)}
        return {"cpu_s": cpu_s, **counts, **self.look_ups.take()}

    def close(self) -> None:
        for owner in self._all():
            owner.endpoint.close()

    def _fill(self, node: Node) -> None:
        node.workers = [Owner(rank, self.world_size, self.mesh, node) for rank in node.ranks]

    def _all(self) -> list[Owner]:
        return [owner for node in self.nodes for owner in node.workers]

    def _addresses(self, nodes: Iterable[Node]) -> dict[int, Address]:
        return {owner.rank: (node.host, owner.endpoint.port) for node in nodes for owner in node.workers}


def _broken(why: str) -> None:
    sys.stderr.write(f"{why}\n")
    os._exit(1)


def main() -> int:
    """Orders are `[name, argument...]`; each is answered with what it returns."""
    owners = Owners(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "begin":
            arguments = [{int(rank): tuple(address) for rank, address in arguments[0].items()}]
        print(json.dumps(getattr(owners, name)(*arguments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
