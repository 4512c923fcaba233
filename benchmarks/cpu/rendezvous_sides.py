"""N real processes that open and close process groups, on each side, and ranks that are killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Endpoint, rehearse

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from ranks import Member, Ranks

OURS, TORCH, TORCH_LAZY = "hyperpod_ext", "torch", "torch, lazy"
SIDES = (OURS, TORCH, TORCH_LAZY)
HOST, SECRET = "127.0.0.1", b"0123456789abcdef"
GENERATIONS = 4
"""The first one, and three more in the same processes."""
_RESOLVER = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo")


class SideError(Exception):
    """A side did not do what was asked of it."""


@dataclass(slots=True)
class Opened:
    """One side at one size; seconds. A phase is over when the last rank is through."""

    connect: float = 0.0
    first_init: float = 0.0
    reinit: list[float] = field(default_factory=list)
    """Of each later generation, until `init_process_group` has returned on every rank."""
    first_sum: list[float] = field(default_factory=list)
    """Of each later generation, the first all-reduce, which makes what connections it needs."""
    destroy: list[float] = field(default_factory=list)
    """How long the slowest rank was blocked."""
    requests: list[int] = field(default_factory=list)
    """Served by the store's process in each rank, in all generations."""
    look_ups: int = 0
    """Names that the store asked a resolver for; -1: not seen from Python."""


# --- opening and closing ------------------------------------------------------------------------


class _Process:
    """What a rank does between two barriers, and how long."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def phase(self, name: str, act: Callable[[], Any]) -> Any:
        self._line.send(("ready", name))
        self._line.recv()
        began = time.monotonic()
        result = act()
        self._line.send(("done", name, began, time.monotonic()))
        return result


def _sum() -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


def _torch_rank(process: _Process, rank: int, size: int, port: int) -> dict[str, Any]:
    def connect() -> dist.TCPStore:
        return dist.TCPStore(HOST, port, size, is_master=rank == 0, timeout=timedelta(seconds=300))

    store = process.phase("connect", connect)
    for generation in range(GENERATIONS):
        prefixed = dist.PrefixStore(str(generation), store)
        process.phase("init", lambda: dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size))  # noqa: B023
        process.phase("sum", _sum)
        process.phase("destroy", dist.destroy_process_group)
    return {"requests": None, "look_ups": -1}


def _our_rank(process: _Process, rank: int, size: int, port: int) -> dict[str, Any]:
    look_ups = []
    sys.addaudithook(lambda event, _: look_ups.append(event) if event in _RESOLVER else None)
    groups = ProcessGroups()
    made: list[Endpoint] = []
    addresses: list[tuple[str, int]] = []

    def connect() -> None:
        endpoint = Endpoint(rank, SECRET, lambda why: print(why, file=sys.stderr))
        made.append(endpoint)
        process._line.send(("port", endpoint.port))
        addresses.extend((HOST, port) for port in process._line.recv())  # as with the message that begins a generation
        store = endpoint.open(addresses, 0)
        store.set(f"there/{rank}", b"yes")
        assert store.get(f"there/{(rank + 1) % size}") == b"yes"

    process.phase("connect", connect)
    for generation in range(1, GENERATIONS + 1):
        process.phase("init", lambda: groups.open(made[0].open(addresses, generation), rank, size, "gloo"))  # noqa: B023
        process.phase("sum", _sum)
        process.phase("destroy", groups.leave)
    return {"requests": made[0].requests, "look_ups": len(look_ups)}


def _run(side: str, rank: int, size: int, port: int, line: Connection, inherited: list[Connection]) -> None:
    die_with_parent(os.getppid())
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    if side == TORCH_LAZY:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    body = _our_rank if side == OURS else _torch_rank
    line.send(("result", body(_Process(line), rank, size, port)))
    os._exit(0)


def measure_opening(side: str, size: int) -> Opened:
    """One side at one size, in fresh processes, forked with their imports done.

    Raises:
        SideError: a rank ended, or was not through in time.
    """
    if side == OURS:
        rehearse()  # as the process does that workers are forked from
    context = get_context("fork")
    lines: list[Connection] = []
    processes = []
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(side, rank, size, port, theirs, [ours, *lines]))
        process.start()
        theirs.close()
        processes.append(process)
        lines.append(ours)
    try:
        return _lead(side, size, lines)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for line in lines:
            line.close()


def _lead(side: str, size: int, lines: list[Connection]) -> Opened:
    found = Opened()
    inits = 0
    while True:
        heard = _hear(side, size, lines)
        if heard[0][0] == "result":
            results = [message[1] for message in heard]
            found.look_ups = sum(result["look_ups"] for result in results) if side == OURS else -1
            found.requests = [result["requests"] for result in results] if side == OURS else []
            return found
        name = heard[0][1]
        for line in lines:
            line.send("go")
        if name == "connect" and side == OURS:
            ports = [message[1] for message in _hear(side, size, lines)]
            message = pickle.dumps(ports)
            for line in lines:
                line.send_bytes(message)
        times = [(began, ended) for _, _, began, ended in _hear(side, size, lines)]
        wall = max(ended for _, ended in times) - min(began for began, _ in times)
        if name == "connect":
            found.connect = wall
        elif name == "init":
            inits += 1
            if inits == 1:
                found.first_init = wall
            else:
                found.reinit.append(wall)
        elif name == "sum" and inits > 1:
            found.first_sum.append(wall)
        elif name == "destroy":
            found.destroy.append(max(ended - began for began, ended in times))


def _hear(side: str, size: int, lines: list[Connection], timeout_s: float = 240.0) -> list[Any]:
    """One message of each rank."""
    deadline = time.monotonic() + timeout_s
    heard: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:  # `wait` makes one for each message: it would take from the ranks
        for rank, line in enumerate(lines):
            selector.register(line, selectors.EVENT_READ, rank)
        while len(heard) < size:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SideError(f"{side}, {size} ranks: not through after {timeout_s:.0f} s")
            for key, _ in ready:
                try:
                    heard[key.data] = lines[key.data].recv()
                except EOFError:
                    raise SideError(f"{side}, {size} ranks: rank {key.data} ended") from None
                selector.unregister(lines[key.data])
    return [heard[rank] for rank in range(size)]


# --- freed --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Freed:
    """Seconds from the moment a death was seen until a survivor was out of its collective."""

    neighbours: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """What each survivor's process ran, from the word that the generation is over until it was out."""
    queued: list[float] = field(default_factory=list)
    """What its main thread waited for a core meanwhile."""


def _reduce_for_ever(numel: int) -> Callable[[Member], None]:
    def body(member: Member) -> None:
        tensor = torch.zeros(numel)
        while member.join():
            with member.faults():
                dist.all_reduce(tensor)
                member.send("busy")
                while True:
                    dist.all_reduce(tensor)

    return body


def measure_freed(size: int, faults: int, numel: int) -> Freed:
    """Kill a rank in the midst of all-reduces, `faults` times in the same survivors."""
    found = Freed()
    target = size // 2
    with Ranks(size, _reduce_for_ever(numel)) as ranks:
        for _ in range(faults):
            ranks.begin(timeout_s=120.0)
            ranks.hear("busy", timeout_s=120.0)
            seen = ranks.kill(target)
            ranks.abort(target)
            for rank, (told,) in ranks.hear("freed", target, timeout_s=120.0).items():
                near = (rank - target) % size in (1, size - 1)
                (found.neighbours if near else found.others).append(told["at"] - seen)
                found.cpu.append(told["cpu"])
                found.queued.append(told["queued"])
            ranks.start(target)
    return found


def measure_stock_wait(timeout_s: float) -> float:
    """How long stock torch's slowest survivor of 4 waits, with a group timeout of `timeout_s`."""
    context = get_context("fork")
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    lines, processes = [], []
    for rank in range(4):
        ours, theirs = context.Pipe()
        process = context.Process(target=_stock_rank, args=(rank, port, timeout_s, theirs))
        process.start()
        lines.append(ours)
        processes.append(process)
    try:
        _hear(TORCH, 4, lines)
        processes[2].kill()
        wait([processes[2].sentinel])
        seen = time.monotonic()
        survivors = [lines[rank] for rank in (0, 1, 3)]
        return max(ended for ended in _hear(TORCH, 3, survivors)) - seen
    finally:
        for process in processes:
            process.kill()
            process.join()


def _stock_rank(rank: int, port: int, timeout_s: float, line: Connection) -> None:
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(HOST, port, 4, is_master=rank == 0)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
    tensor = torch.zeros(1 << 20)
    dist.all_reduce(tensor)
    line.send("busy")
    with contextlib.suppress(RuntimeError):
        while True:
            dist.all_reduce(tensor)
    line.send(time.monotonic())
    while True:  # its sockets stay open, as those of a rank that has not understood yet
        time.sleep(60)
