"""What a copy to a peer costs over TCP and by NIXL, in turns, beside the kernel's copy from one process to another.

`python benchmarks/cpu/transport.py [--mib 256] [--rounds 5]` prints MB/s and CPU seconds a GB of all processes of both
nodes: replication as a job does it, checksums and all. Both nodes are on this machine: NIXL goes over shared memory,
which is UCX's cma, TCP over loopback.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from peer_node import MIB, Node

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

KINDS = ("tcp", "nixl")
_WAIT_S = 120.0
_CALL = 4 * MIB
_libc = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def serve(mib: int, kind: str) -> None:
    """A node that keeps copies, until its input is closed."""
    node = Node(1, transport=kind, budget=8 * mib * MIB)
    print(node.server.port, flush=True)
    sys.stdin.read()
    node.close()


def hold(mib: int) -> None:
    """Memory to be read by another process, until the input is closed."""
    memory = mmap.mmap(-1, mib * MIB)
    memory[:] = bytes([7]) * len(memory)
    print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
    sys.stdin.read()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process and those that it has started have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return used + sum(cpu_of(int(child)) for child in children)


def cost(nbytes: int, work: Callable[[], object]) -> tuple[float, float]:
    """MB/s, and CPU seconds a GB, of all processes here."""
    began, cpu = time.monotonic(), cpu_of(os.getpid())
    work()
    return nbytes / (time.monotonic() - began) / 1e6, (cpu_of(os.getpid()) - cpu) / nbytes * 1e9


def copy(node: Node, port: int, step: int, nbytes: int) -> tuple[float, float]:
    """Of one snapshot's copy, from when its peer is named. It is saved before."""
    node.replicator.set_peers({})
    node.save(0, step, os.urandom(MIB) * (nbytes // MIB))

    def replicate() -> None:
        node.replicator.set_peers({1: ("127.0.0.1", port)})
        assert node.replicator.wait_idle(_WAIT_S)

    measured, status = cost(nbytes, replicate), node.replicator.status()
    assert (status["failed"], status["fell_back"]) == (0, ""), status
    return measured


def read_other(pid: int, address: int, destination: mmap.mmap) -> None:
    """One copy by the kernel, from one process to another: what UCX's cma does."""
    ours = ctypes.addressof(ctypes.c_char.from_buffer(destination))
    for start in range(0, len(destination), _CALL):
        spans = _Span(ours + start, _CALL), _Span(address + start, _CALL)
        count = _libc.process_vm_readv(pid, ctypes.byref(spans[0]), 1, ctypes.byref(spans[1]), 1, 0)
        assert count == _CALL, os.strerror(ctypes.get_errno())


def started(*arguments: object) -> tuple[subprocess.Popen[str], int]:
    """This program as another process, and the number that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int((process.stdout or sys.stdin).readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the snapshot; a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    mib, nbytes = arguments.mib, arguments.mib * MIB
    if arguments.serve or arguments.hold:
        hold(mib) if arguments.hold else serve(mib, arguments.serve)
        return
    servers = {kind: started("--serve", kind, "--mib", mib) for kind in KINDS}
    nodes = {kind: Node(0, transport=kind, budget=8 * nbytes) for kind in KINDS}
    holder, address = started("--hold", "--mib", mib)
    destination, other = mmap.mmap(-1, nbytes), bytearray(nbytes)
    floors: dict[str, Callable[[], object]] = {
        "kernel's copy": lambda: read_other(holder.pid, address, destination),
        "checksum": lambda: crc64nvme(memoryview(destination)),
        "memcpy": lambda: memoryview(destination).__setitem__(slice(None), other),
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in (*KINDS, *floors)}
    for step in range(1, arguments.rounds + 2):
        found = {kind: copy(nodes[kind], servers[kind][1], step, nbytes) for kind in KINDS}
        found |= {name: cost(nbytes, floor) for name, floor in floors.items()}
        for name, one in found.items() if step > 1 else ():  # the first touches memory, and starts NIXL
            measured[name].append(one)
    cpus, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{mib} MiB, {arguments.rounds} rounds in turns, {cpus} cores, load {load:.1f}; medians, CPU of both nodes")
    median = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in measured.items()
    }
    for name, (speed, cpu) in median.items():
        print(f"{name:14} {speed:7.0f} MB/s  {cpu:5.2f} CPU seconds a GB")
    print(f"NIXL moves {median['tcp'][1] / median['nixl'][1]:.2f} times TCP's bytes for a CPU second", end="; ")
    least = median["kernel's copy"][1] + median["checksum"][1]
    print(f"the kernel's copy with a checksum {median['tcp'][1] / least:.2f} times")
    for node in nodes.values():
        node.close()
    for process, _ in [*servers.values(), (holder, 0)]:
        process.communicate("")


if __name__ == "__main__":
    main()
