"""The process that is measured: one coordinator, which says on request what it has cost so far.

    python coordinator_process.py RUN_DIR NODES WORKERS_PER_NODE SPARES [HANDSHAKE]

The first line of its output is the port. To each line of its input it answers with one JSON object: seconds of CPU and
bytes of resident memory. It ends with its input. HPX_BENCH_PROFILE names a file for a profile of what lies between the
first and the last such line. HANDSHAKE names a file with what an agent knows, whose node takes the place of a
coordinator that is lost.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import sys
import time
from pathlib import Path

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.processes import collect_seldom
from hyperpod_ext.runtime.agent.election import ElectionListener, places_for
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import read

SECRET = b"the secret of this benchmark's job"
LEASE_S = 600.0
"""Long: no heartbeat is due while something is measured."""


async def main(run_dir: Path, nodes: int, workers_per_node: int, spares: int, known: Path | None) -> None:
    config = RuntimeConfig(
        name="bench",
        nodes=nodes,
        workers_per_node=workers_per_node,
        spares=spares,
        restart=RestartPolicy(lease_s=LEASE_S),
        checkpoint=CheckpointPolicy(tiers=(MemoryTier(), PeerTier())),
    )
    listener = ElectionListener(SECRET, _fail, places_for(nodes + spares))
    await listener.open("127.0.0.1", 0)
    if known is None:
        coordinator = Coordinator.first(config, 0, run_dir, 1)
    else:
        own = read(c.AgentHandshake, json.loads(known.read_text()), "handshake")
        coordinator = Coordinator.successor(config, own.node, run_dir, own, [])
    listener.lead_to(coordinator)
    print(listener.address[1], flush=True)
    await _answer()
    coordinator.stop()
    await listener.close()


def _fail(why: str) -> None:
    sys.stderr.write(f"the coordinator broke: {why}\n")
    os._exit(1)


async def _answer() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    profile = cProfile.Profile() if "HPX_BENCH_PROFILE" in os.environ else None
    while line := await reader.readline():
        if profile is not None and line == b"profile\n":
            profile.enable()
        elif profile is not None and line == b"profiled\n":
            profile.disable()
            profile.dump_stats(os.environ["HPX_BENCH_PROFILE"])
        print(json.dumps({"cpu_s": time.process_time(), "rss_bytes": _resident_bytes()}), flush=True)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    collect_seldom()  # as its agent does
    nodes, workers_per_node, spares = (int(number) for number in sys.argv[2:5])
    known = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    asyncio.run(main(Path(sys.argv[1]), nodes, workers_per_node, spares, known))
