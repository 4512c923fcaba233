"""The HTTP that AWS's checkpoint client speaks, over memory that is used again: fast enough not to be what is measured.

A process of its own: `python -m checkpoint.aws_memory` prints its URL.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from hyperpod_ext.processes import die_with_parent

_CHECKPOINT = re.compile(r"/v1/cp/checkpoints/([^/]+)/(\d+)/(\d+)")
_LATEST = re.compile(r"/v1/cp/checkpoints/([^/]+)/latest")
_NAMESPACE = re.compile(r"/v1/cp/namespaces/([^/]+)")
KEPT = 2
"""Steps of each rank. The real service is asked to keep 3; memory here is shared by all that is measured."""


class Memory:
    """What is kept, and buffers that are free again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.namespaces: dict[str, dict[str, int]] = {}
        self.shards: dict[tuple[str, int], dict[int, tuple[bytearray, int, str]]] = {}
        self._free: list[bytearray] = []

    def buffer(self, nbytes: int) -> bytearray:
        with self.lock:
            for index, free in enumerate(self._free):
                if nbytes <= len(free) <= 2 * nbytes + 65536:
                    return self._free.pop(index)
        return bytearray(nbytes + nbytes // 16)

    def put(self, key: tuple[str, int], step: int, data: tuple[bytearray, int, str]) -> None:
        with self.lock:
            kept = self.shards.setdefault(key, {})
            if step in kept:
                self._free.append(kept.pop(step)[0])
            kept[step] = data
            while len(kept) > KEPT:
                self._free.append(kept.pop(min(kept))[0])


def _serve(connection: socket.socket, memory: Memory) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rest = b""
    with contextlib.suppress(ConnectionError), connection:
        while True:
            while b"\r\n\r\n" not in rest:
                more = connection.recv(65536)
                if not more:
                    return
                rest += more
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            nbytes = int(headers.get("content-length", 0))
            body = memory.buffer(nbytes)
            view = memoryview(body)[:nbytes]
            view[: len(rest)], have, rest = rest[:nbytes], len(rest[:nbytes]), rest[nbytes:]
            while have < nbytes:
                received = connection.recv_into(view[have:])
                if not received:
                    return
                have += received
            method, target, _ = first.split(" ", 2)
            status, answer, extra = _answer(memory, method, target, headers, body, nbytes)
            connection.sendall(f"HTTP/1.1 {status} -\r\nContent-Length: {len(answer)}\r\n{extra}\r\n".encode())
            connection.sendall(answer)


def _answer(
    memory: Memory, method: str, target: str, headers: dict[str, str], body: bytearray, nbytes: int
) -> tuple[int, bytes | memoryview, str]:
    url = urlsplit(target)
    if found := _CHECKPOINT.fullmatch(url.path):
        key, step = (found[1], int(found[2])), int(found[3])
        if method == "POST":
            memory.put(key, step, (body, nbytes, headers.get("shard-meta", "")))
            return 200, b'{"status": "ok"}', ""
        held = memory.shards.get(key, {}).get(step)
        if method == "GET" and held:
            return 200, memoryview(held[0])[: held[1]], f"Shard-Meta: {held[2]}\r\n" if held[2] else ""
    if (found := _LATEST.fullmatch(url.path)) and found[1] in memory.namespaces:
        steps = {step for (name, _), kept in memory.shards.items() if name == found[1] for step in kept}
        return 200, json.dumps(sorted(steps, reverse=True)[:5]).encode(), ""
    if found := _NAMESPACE.fullmatch(url.path):
        if method == "POST":
            ranks = int(parse_qs(url.query)["num_ranks"][0])
            memory.namespaces[found[1]] = {"num_ranks": ranks, "steps_to_retain_per_rank": KEPT}
        if found[1] in memory.namespaces:
            return 200, json.dumps(memory.namespaces[found[1]]).encode(), ""
    return 404, b'{"detail": "Not found"}', ""


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """URL and process id of a server that ends with this block, or with this process."""
    command = [sys.executable, "-m", "checkpoint.aws_memory", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    memory = Memory()
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(f"http://127.0.0.1:{server.getsockname()[1]}", flush=True)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection, memory), daemon=True).start()


if __name__ == "__main__":
    main()
