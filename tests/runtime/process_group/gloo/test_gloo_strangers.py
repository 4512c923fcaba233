"""Strangers at gloo's own port, who begin as a rank does."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

RANKS, LISTENS = 2, "0A"
NUMBERS = 24
"""gloo numbers the connections of a process; a connection begins with the number that it is to be."""


def ports_of(pid: int) -> list[int]:
    """TCP ports of this machine that the process listens on."""
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line for line in lines if line[3] == LISTENS and f"socket:[{line[9]}]" in opened]
    return [int(line[1].split(":")[1], 16) for line in listening]


RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
store, number = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(minutes=1))
print("open", flush=True)
sys.stdin.readline()
for _ in range(5):
    value = torch.full((1000,), float(number + 1))
    dist.all_reduce(value)
    assert (value == 3).all()
print("equal", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_stranger_at_an_open_group_reaches_no_collective(tmp_path: Path) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "0"}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(RANKS):
            command = [sys.executable, "-c", RANK, str(tmp_path / "store"), str(number)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes.append(stack.enter_context(subprocess.Popen(command, env=environ, **pipes)))
            stack.callback(processes[-1].kill)
        assert [process.stdout.readline() for process in processes] == ["open\n"] * RANKS
        ports = [port for process in processes for port in ports_of(process.pid)]
        assert len(ports) == RANKS
        for port in ports:
            for at in range(NUMBERS):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.sendall(struct.pack("<q", at) + b"\xff" * 200)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.stdout.readline() for process in processes] == ["equal\n"] * RANKS
