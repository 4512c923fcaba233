"""The control plane by number of nodes: a job's start, a lost node, and a lost coordinator, counted and timed there.

    python benchmarks/cpu/control_plane_bench.py --sizes 16 64 256

Prints the table, and writes control-plane.json and control-plane.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from control_plane.agents import Cluster
from control_plane.coordinator_process import SECRET
from control_plane.page import make_document, make_page, make_table
from publish import RESULTS, publish

from hyperpod_ext.runtime.ipc.declared import encode

_PROGRAM = Path(__file__).parent / "control_plane" / "coordinator_process.py"


async def measure(nodes: int, workers_per_node: int, at_once: int, limit_s: float) -> dict[str, Any]:
    """One row: a job of `nodes` nodes and a spare starts, makes a step, loses a node, and then its coordinator."""
    spares = 1
    numbers = [str(number) for number in (nodes, workers_per_node, spares)]
    with tempfile.TemporaryDirectory(prefix="hpx-bench-") as folder:
        cluster = Cluster(nodes, spares, workers_per_node)
        async with _coordinator(folder, *numbers) as coordinator:
            row = await _measure(coordinator, cluster, Path(folder) / "events.jsonl", at_once, limit_s)
        with (Path(folder) / "events.jsonl").open("rb") as log:
            row["step_log_bytes"] = sum(len(line) for line in log if b'"event":"step"' in line)
        known = Path(folder) / "known.json"
        successor = cluster.agents[1]
        known.write_text(json.dumps(encode(successor.handshake(trains=True, job_state=successor.job_state()))))
        async with _coordinator(folder, *numbers, str(known)) as coordinator:
            return row | await _measure_takeover(coordinator, cluster, at_once, limit_s)


@asynccontextmanager
async def _coordinator(*arguments: str) -> AsyncIterator[Process]:
    coordinator = await asyncio.create_subprocess_exec(
        sys.executable, str(_PROGRAM), *arguments, stdin=PIPE, stdout=PIPE
    )
    try:
        yield coordinator
    finally:
        if coordinator.returncode is None:
            coordinator.kill()
        await coordinator.wait()


async def _measure(coordinator: Process, cluster: Cluster, log: Path, at_once: int, limit_s: float) -> dict[str, Any]:
    before, began = await _come(coordinator, cluster, at_once, range(-1, cluster.nodes))
    await cluster.all_hear("go", 1, len(cluster.agents), limit_s)
    started, start_s, start = await _ask(coordinator), time.perf_counter() - began, cluster.traffic
    for agent in cluster.agents[: cluster.nodes]:
        agent.step()
    stepped = await _ask_when_idle(coordinator)
    cluster.traffic, logged = type(cluster.traffic)(), log.stat().st_size
    await _ask(coordinator, b"profile\n")
    began = time.perf_counter()
    cluster.agents[cluster.nodes - 1].hang_up()
    await cluster.all_hear("go", 2, len(cluster.agents) - 1, limit_s)
    fault_s = time.perf_counter() - began
    after = await _ask_when_idle(coordinator, b"profiled\n")
    for agent in cluster.agents:
        agent.hang_up()
    ranks = cluster.nodes * cluster.workers_per_node
    fault = cluster.traffic
    return {
        "nodes": cluster.nodes,
        "ranks": ranks,
        "start_cpu_s": round(started["cpu_s"] - before["cpu_s"], 4),
        "fault_cpu_s": round(after["cpu_s"] - stepped["cpu_s"], 4),
        "fault_bytes": fault.nbytes,
        "fault_messages": fault.messages,
        "fault_log_bytes": log.stat().st_size - logged,
        "rss_bytes": after["rss_bytes"],
        "start_s": round(start_s, 4),
        "fault_s": round(fault_s, 4),
        "start_bytes": start.nbytes,
        "start_messages": start.messages,
        "step_cpu_s": round(stepped["cpu_s"] - started["cpu_s"], 4),
        "fault_by_kind": fault.by_kind,
        "start_by_kind": start.by_kind,
    }


async def _measure_takeover(coordinator: Process, cluster: Cluster, at_once: int, limit_s: float) -> dict[str, Any]:
    """The coordinator's node is lost, too: all others come to the next one, which has their ranks leave their step."""
    cluster.traffic = type(cluster.traffic)()
    there = [node for node in range(-1, cluster.nodes - 1) if node]
    before, began = await _come(coordinator, cluster, at_once, there, trains=True)
    await cluster.all_hear("abort", 3, len(there), limit_s)
    takeover_s, takeover = time.perf_counter() - began, cluster.traffic
    after = await _ask_when_idle(coordinator)
    for agent in cluster.agents:
        agent.hang_up()
    return {
        "takeover_cpu_s": round(after["cpu_s"] - before["cpu_s"], 4),
        "takeover_bytes": takeover.nbytes,
        "takeover_messages": takeover.messages,
        "takeover_s": round(takeover_s, 4),
        "takeover_by_kind": takeover.by_kind,
    }


async def _come(
    coordinator: Process, cluster: Cluster, at_once: int, nodes: Iterable[int], *, trains: bool = False
) -> tuple[dict[str, Any], float]:
    """Agents reach the coordinator, all in one moment; -1: the spare's. Its costs before, and when they began."""
    assert coordinator.stdout is not None
    port = int(await coordinator.stdout.readline())
    before, began = await _ask(coordinator), time.perf_counter()
    gate = asyncio.Semaphore(at_once)

    async def come(node: int) -> None:
        async with gate:
            await cluster.agents[node].come(port, SECRET, trains=trains)

    await asyncio.gather(*(come(node) for node in nodes))
    return before, began


async def _ask(coordinator: Process, line: bytes = b"\n") -> dict[str, Any]:
    assert coordinator.stdin is not None
    assert coordinator.stdout is not None
    coordinator.stdin.write(line)
    answer = await coordinator.stdout.readline()
    if not answer:
        raise SystemExit("the coordinator has ended; its last words are above")
    found: dict[str, Any] = json.loads(answer)
    return found


async def _ask_when_idle(coordinator: Process, line: bytes = b"\n") -> dict[str, Any]:
    """What it has cost once it has nothing more to do: its CPU time stands still."""
    before = await _ask(coordinator)
    while True:
        await asyncio.sleep(0.1)
        now = await _ask(coordinator)
        if now["cpu_s"] - before["cpu_s"] < 0.005:
            return await _ask(coordinator, line)
        before = now


def main() -> int:
    args = _parse()
    rows = []
    for nodes in args.sizes:
        rows.append(asyncio.run(measure(nodes, args.workers, args.at_once or nodes + 1, args.limit_s)))
        print(
            json.dumps({key: value for key, value in rows[-1].items() if args.kinds or "kind" not in key}),
            file=sys.stderr,
        )
    command = "python benchmarks/cpu/control_plane_bench.py --sizes " + " ".join(str(size) for size in args.sizes)
    document = make_document(rows, command)
    print(make_table(document))
    publish(args.out, "control-plane", document, make_page(document))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 512, 1024, 2048], help="numbers of nodes")
    parser.add_argument("--workers", type=int, default=8, help="workers of each node (default: 8)")
    parser.add_argument("--at-once", type=int, default=0, help="connections opened at the same time (default: all)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="how long a start or a fault may take")
    parser.add_argument("--kinds", action="store_true", help="show bytes and messages of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if min(args.sizes) < 2 or args.workers < 1:
        parser.error("at least 2 nodes, and 1 worker on each")
    return args


if __name__ == "__main__":
    sys.exit(main())
