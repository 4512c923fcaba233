"""What a copy to a peer costs and how it comes back, beside the same bytes over plain sockets in the same round."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint.group import Group, Job, Process, environment_of
from checkpoint.measure import TRAINING_S, Bench, Row, batches_at_work, calibrate, first, repeats, time_lost
from checkpoint.systems import OURS

MAX_SLOWDOWN = 0.05
"""The default of the peer tier."""
_COPIES, _MOST_RESTORES = 6, 5
_STEPS = 2
"""Between saves, and at least with each."""
_TIMEOUT_S = 120.0


def measure_replicas(bench: Bench) -> None:
    """Two ranks, each a node: saves with a copy on the other; then one forgets, and its rank restores from there."""
    systems = [system for system in bench.systems if "replicates" in system.has]
    for what, light in (("replicate", True), ("replicate_both", False)):
        jobs = [Job(system, "plain", bench.nbytes, 2, overlapped=True, replicas=1, light=light) for system in systems]
        for members, _ in batches_at_work(bench, "replicas, one way" if light else "replicas, both ways", jobs):
            with ExitStack() as stack:
                pairs = {
                    name: stack.enter_context(_pair(bench, max_slowdown, both_ways=not light))
                    for name, max_slowdown in (("nice", MAX_SLOWDOWN), ("plain", None))
                    if OURS in members.groups
                }
                for number in range(bench.rounds):
                    members.each(number, partial(_replicate, bench, what, number, pairs))
            for number in range(bench.rounds if light else 0):
                members.each(number, partial(_peer_restore, bench, number), "peer_restore")


# --- a copy, and what it costs ---------------------------------------------------------------------


class Pair:
    """Two nodes that copy over plain sockets."""

    def __init__(self, nodes: list[Process], both_ways: bool) -> None:
        self._nodes, self._both_ways = nodes, both_ways
        for node in nodes:
            node.ask("port")
        self._ports = [int(node.answer(time.monotonic() + _TIMEOUT_S)["port"]) for node in nodes]

    def copy(self) -> tuple[float, float]:
        """When the first node's bytes were on the second, and CPU seconds of both."""
        self._nodes[0].ask("copy", port=self._ports[1], take=self._both_ways)
        self._nodes[1].ask("copy", port=self._ports[0] if self._both_ways else None, take=True)
        answers = [node.answer(time.monotonic() + _TIMEOUT_S) for node in self._nodes]
        return answers[1]["received"], sum(answer["cpu"] for answer in answers)


@contextmanager
def _pair(bench: Bench, max_slowdown: float | None, *, both_ways: bool) -> Iterator[Pair]:
    settings = {"nbytes": bench.states["plain"]["nbytes"], "streams": bench.streams, "max_slowdown": max_slowdown}
    arguments = ["-m", "checkpoint.raw_copy", json.dumps(settings | {"parent": os.getpid()})]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        nodes = []
        for number in range(2):
            nodes.append(Process(sys.executable, arguments, environment_of({}), Path(folder) / f"{number}.log"))
            stack.callback(nodes[-1].quit)
        yield Pair(nodes, both_ways)


def _replicate(bench: Bench, what: str, number: int, pairs: dict[str, Pair], group: Group) -> None:
    calibrate(bench, group)
    rows = _windows(bench, 1000 * (number + 1), group)  # ours copies steps that are even
    found = {name: median(row[name] for row in rows) for name in rows[0]}
    if group.job.system.name == OURS:
        for name, pair in pairs.items():
            beside = [_beside(bench, group, pair) for _ in repeats(_COPIES, TRAINING_S)]
            found |= {f"{name}_{key}": median(row[key] for row in beside) for key in beside[0]}
        found["of_nice"] = found["done_ratio"] / found["nice_done_ratio"]
        found["cpu_of_nice"] = found["cpu_s"] / found["nice_cpu_s"]
    bench.keep(what, "plain", group.job.system, number, **found, windows=len(rows))


def _windows(bench: Bench, step: int, group: Group) -> list[Row]:
    """What each copy cost the first rank, and what a save costs it that is not copied."""
    saves = {"step": step, "repeats": min(_COPIES, bench.windows)}
    cpu = group.ask_host("cpu")["seconds"]
    group.ranks[1].ask("follow", **saves)
    ours = group.job.system.name == OURS  # others copy each of their saves
    told = first(group, "replicate", **saves, steps=_STEPS, tokens=bench.tokens, alone=ours)
    group.ranks[1].answer(time.monotonic() + _TIMEOUT_S)
    cpu = group.ask_host("cpu")["seconds"] - cpu
    wall, adj = told["floor"]["wall"], told["floor"]["adj"]
    rows = []
    for window in told["windows"]:
        copied, plain = window["copied"], window["plain"]
        row = {
            "blocked_ratio": sum(copied["blocked"]) / adj,
            "lost_ratio": time_lost(copied, plain[:2], "wall") / wall,
            "done_ratio": (copied["replicated"] - copied["staged"]) / wall,
            "since_save_ratio": copied["replicated"] / wall,
            "floor_s": wall,
            "cpu_s": cpu / saves["repeats"],
        }
        if ours:
            row["more_blocked_ratio"] = row["blocked_ratio"] - sum(window["alone"]["blocked"]) / adj
            row["more_lost_ratio"] = row["lost_ratio"] - time_lost(window["alone"], plain[1:], "wall") / wall
        rows.append(row)
    return rows


def _beside(bench: Bench, group: Group, pair: Pair) -> Row:
    """The same trainer, beside a plain copy of as many bytes between two other processes."""
    steps = {"steps": _STEPS, "tokens": bench.tokens}
    before = first(group, "train", **steps)
    with socket.create_server(("127.0.0.1", 0)) as server:
        group.ranks[0].ask("beside", port=server.getsockname()[1], **steps)
        line, _ = server.accept()
        with line:
            line.recv(1)  # its first step has begun
            start = time.monotonic()
            received, cpu = pair.copy()
            line.sendall(b"\1")
        found = group.ranks[0].answer(time.monotonic() + _TIMEOUT_S)
    after = first(group, "train", **steps)
    floor = found["floor"]["wall"]
    return {
        "lost_ratio": time_lost(found, [before, after], "wall") / floor,
        "done_ratio": (received - start) / floor,
        "cpu_s": cpu,
    }


# --- and back --------------------------------------------------------------------------------------


def _peer_restore(bench: Bench, number: int, group: Group) -> None:
    """Restores of the rank whose node forgot, each beside plain sockets; the other rank does nothing meanwhile."""
    step = 100_000 + 2 * number
    group.ask("fill", step=step)
    group.ask("copy_one", step=step)
    group.kill()
    group.ask_host("lose", rank=0)
    group.start()
    group.ask("prepare")
    together = "restores_together" in group.job.system.has
    pairs = []
    for _ in repeats(1 if together else _MOST_RESTORES):
        restored = group.ask("restore", step=step, last=None if together else 0)
        if not all(answer["equal"] for answer in restored):
            bench.failed(group.job.system, "restore from a peer", f"step {step} did not come back")
            return
        seconds, raw = restored[0]["restore"]["wall"], _raw_copy(group, bench.streams)
        floor = restored[0]["floor"]["wall"]
        pairs.append({"seconds": seconds, "raw_s": raw, "ratio": seconds / raw, "floor_s": floor})
    found = {name: median(pair[name] for pair in pairs) for name in pairs[0]}
    bench.keep("peer_restore", "plain", group.job.system, number, **found, restores=len(pairs))


def _raw_copy(group: Group, streams: int) -> float:
    """Seconds for the same bytes over plain sockets into the same process."""
    data = memoryview(bytearray(b"\1") * group.described[0]["nbytes"])

    def send() -> None:
        line, _ = server.accept()
        with line:
            nbytes = int.from_bytes(line.recv(8), "little")
            line.sendall(data[:nbytes])

    with socket.create_server(("127.0.0.1", 0), backlog=streams) as server:
        senders = [threading.Thread(target=send) for _ in range(streams)]
        for sender in senders:
            sender.start()
        found: dict[str, Any] = first(group, "receive", port=server.getsockname()[1], streams=streams)
        for sender in senders:
            sender.join()
    return float(found["wall"])
