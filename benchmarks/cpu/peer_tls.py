"""What TLS between memory servers costs: one snapshot read from a peer again and again, with TLS and without, in turns.

`python benchmarks/cpu/peer_tls.py [--mib 256] [--rounds 5]` prints MB/s and CPU seconds a GB, of both ends together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from peer_node import JOB, MIB, SECRET, Node

from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient

_KINDS = {"plain": False, "TLS": True}


def serve(mib: int, encrypted: bool) -> None:
    """A node with one snapshot, until its input is closed."""
    node = Node(0, encrypted=encrypted, budget=4 * mib * MIB)
    node.save(0, 1, os.urandom(MIB) * mib)
    print(node.server.port, flush=True)
    sys.stdin.read()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(process: subprocess.Popen[str], port: int, nbytes: int, encrypted: bool) -> tuple[float, float]:
    """MB/s, and CPU seconds a GB."""
    peer = PeerClient("127.0.0.1", port, SECRET, encrypted=encrypted)
    peer.open(0, "g1-s1", job=JOB)
    image = memoryview(bytearray(nbytes))
    began, cpu = time.monotonic(), cpu_of(process.pid) + time.process_time()
    peer.read_scattered(0, "g1-s1", [(0, image)], nbytes)
    seconds, used = time.monotonic() - began, cpu_of(process.pid) + time.process_time() - cpu
    peer.close()
    return nbytes / seconds / 1e6, used / nbytes * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the snapshot")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=_KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.mib, _KINDS[arguments.serve])
        return
    servers, ports = {}, {}
    for kind in _KINDS:
        command = [sys.executable, __file__, "--serve", kind, "--mib", str(arguments.mib)]
        servers[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ports[kind] = int((servers[kind].stdout or sys.stdin).readline())
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    for _ in range(arguments.rounds):
        for kind, encrypted in _KINDS.items():
            found[kind].append(measure(servers[kind], ports[kind], arguments.mib * MIB, encrypted))
    print(
        f"{arguments.mib} MiB over loopback, {arguments.rounds} rounds in turns, load {os.getloadavg()[0]:.1f}; medians"
    )
    for kind, measured in found.items():
        speed, cpu = (statistics.median(values) for values in zip(*measured, strict=True))
        print(f"{kind:6} {speed:7.0f} MB/s  {cpu:5.2f} CPU seconds a GB, of both ends")
        servers[kind].communicate("")


if __name__ == "__main__":
    main()
