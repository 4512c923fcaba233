"""What parity costs in groups of k nodes: keeping it, and rebuilding a lost node's image, beside one whole copy.

`python benchmarks/cpu/parity.py [--mib 64] [--groups 4 8] [--rounds 3]` prints bytes and CPU seconds of all nodes, for
a byte and a GB of one image. Each node is a process with one rank, over loopback; this one rebuilds. It ends with an
error where bytes or memory are not what docs/checkpointing.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from peer_node import JOB, MIB, SECRET, Node, content

from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.client.rebuild import Rebuilt
from hyperpod_ext.runtime.snapshot.manifest import check_bytes

_WAIT_S = 120.0
LOST = 0


def image(rank: int, mib: int) -> bytes:
    return content(MIB, rank) * mib


def serve(number: int, mib: int, tier: dict[str, Any]) -> None:
    """A node that saves a step for each line that it reads, and says when its group, or its peer, has it."""
    node, data = Node(number, budget=16 * mib * MIB, **tier), image(number, mib)
    print(node.server.port, flush=True)
    ports = json.loads(input())
    peers = {other: ("127.0.0.1", port) for other, port in enumerate(ports) if other != number}
    if node.parts is not None:
        node.replicator.set_peers(peers, group={other: (other,) for other in range(len(ports))})
    else:  # copies go round
        node.replicator.set_peers(peers, dict.fromkeys(peers, ""))
    for line in sys.stdin:
        node.save(number, int(line), data)
        assert node.replicator.wait_idle(_WAIT_S), node.replicator.status()
        pieces = [piece["nbytes"] for piece in node.parts.held()] if node.parts is not None else []
        print(json.dumps({"sent": node.replicator.status()["bytes_sent"], "piece": max(pieces, default=0)}), flush=True)


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Group:
    """Nodes as processes of their own."""

    def __init__(self, size: int, mib: int, **tier: Any) -> None:
        command = [sys.executable, __file__, "--mib", str(mib), "--tier", json.dumps(tier), "--serve"]
        self._nodes = [
            subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in range(size)
        ]
        self.ports = [int(self._read(node)) for node in self._nodes]
        self._tell(json.dumps(self.ports))

    def save(self, step: int) -> list[dict[str, int]]:
        """What each node says once all have it."""
        self._tell(str(step))
        return [json.loads(self._read(node)) for node in self._nodes]

    def cpu(self) -> float:
        """Seconds that its processes and this one have used."""
        return sum(map(_cpu_of, (*(node.pid for node in self._nodes), os.getpid())))

    def lose(self, number: int) -> None:
        self._nodes[number].kill()
        self._nodes[number].wait()
        del self._nodes[number]

    def end(self) -> None:
        for node in self._nodes:
            node.communicate("")

    def _tell(self, line: str) -> None:
        for node in self._nodes:
            assert node.stdin is not None
            print(line, file=node.stdin, flush=True)

    @staticmethod
    def _read(node: subprocess.Popen[str]) -> str:
        assert node.stdout is not None
        return node.stdout.readline()


@dataclass
class Costs:
    """For a byte of one image; seconds for a GB of it."""

    sent: float
    memory: float
    keep_cpu_s: float
    rebuild_s: float = 0.0
    rebuild_cpu_s: float = 0.0


def measured(size: int, mib: int, **tier: Any) -> Costs:
    """One round: two steps are kept, then node 0 is lost, and its image made here."""
    group, nbytes = Group(size, mib, **tier), mib * MIB
    before = group.save(1)  # memory is touched for the first time
    began = group.cpu()
    after = group.save(2)
    keeping = (group.cpu() - began) / size / nbytes * 1e9
    sent = sum(now["sent"] - then["sent"] for now, then in zip(after, before, strict=True)) / size / nbytes
    costs = Costs(sent, max(one["piece"] for one in after) / nbytes if "parity" in tier else 1.0, keeping)
    group.lose(LOST)
    peers = {rank: PeerClient("127.0.0.1", port, SECRET) for rank, port in enumerate(group.ports) if rank != LOST}
    began, cpu = time.monotonic(), group.cpu()
    if "parity" in tier:
        rebuilt = Rebuilt.open(peers, LOST, "g1-s2", job=JOB)
        found = rebuilt.load()
        check_bytes(rebuilt.manifest, found)
    else:
        found = memoryview(bytearray(nbytes))
        next(iter(peers.values())).read_into(LOST, "g1-s2", 0, found)
    costs.rebuild_s = (time.monotonic() - began) / nbytes * 1e9
    costs.rebuild_cpu_s = (group.cpu() - cpu) / nbytes * 1e9
    assert found == image(LOST, mib), "what was rebuilt is not what was lost"
    group.end()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of an image")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="nodes of a group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tier", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.mib, json.loads(arguments.tier))
        return
    kinds: dict[str, tuple[int, dict[str, Any]]] = {"one copy": (2, {})}
    kinds |= {f"parity of {size}": (size, {"parity": size}) for size in arguments.groups}
    rounds = [
        {name: measured(size, arguments.mib, **tier) for name, (size, tier) in kinds.items()}
        for _ in range(arguments.rounds)
    ]
    cpus, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{arguments.mib} MiB an image, medians of {arguments.rounds} rounds in turns, {cpus} cores, load {load:.1f}")
    print(f"{'':12} {'bytes sent':>10} {'memory':>8} {'CPU s/GB':>9}   {'bytes read':>10} {'CPU s/GB':>9} {'s/GB':>6}")
    for name, (size, tier) in kinds.items():
        median = Costs(
            *(statistics.median(getattr(one[name], field) for one in rounds) for field in Costs.__annotations__)
        )
        read = size - 1 if tier else 1
        print(
            f"{name:12} {median.sent:10.2f} {median.memory:7.1%} {median.keep_cpu_s:9.2f}   {read:10} "
            f"{median.rebuild_cpu_s:9.2f} {median.rebuild_s:6.2f}"
        )
        assert abs(median.sent - 1) < 0.01, "each image is sent once"
        assert not tier or abs(median.memory - 1 / (size - 1)) < 0.01, "a piece is 1/(k - 1) of an image"


if __name__ == "__main__":
    main()
