"""One node of a plain copy over sockets: sends memory to the other node, takes the other's, and nothing else.

python -m checkpoint.raw_copy '{"nbytes": ..., "streams": 2, "max_slowdown": 0.05, "parent": ...}'

Two of them, in processes of their own, are the floor of copies to a peer. With `max_slowdown` they give way to
training as our memory servers do; without, they do not.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority, own_group

Answer = dict[str, Any]
_LOCAL = "127.0.0.1"


class Node:
    def __init__(self, nbytes: int, streams: int, max_slowdown: float | None) -> None:
        self.cpu_priority = CpuPriority(max_slowdown, own_group()) if max_slowdown else None
        self.source, self.target = (memoryview(bytearray(b"\1") * nbytes) for _ in range(2))
        self.share, self.streams = -(-nbytes // streams), streams
        self.listener = socket.create_server((_LOCAL, 0), backlog=streams)

    def port(self) -> Answer:
        return {"port": self.listener.getsockname()[1]}

    def copy(self, port: int | None, take: bool) -> Answer:
        """All of it to the node at `port`, and all of the other's to here, or one of both. `received`: when that was
        there, on the clock that all processes share."""
        parts = [slice(index * self.share, (index + 1) * self.share) for index in range(self.streams)]
        self.received = 0.0
        before = os.times()
        if self.cpu_priority:
            self.cpu_priority.copy_begins()
        takers = [threading.Thread(target=self._take, args=(part,)) for part in parts if take]
        senders = [threading.Thread(target=self._send, args=(port, part)) for part in parts if port]
        _start_and_join(takers, senders)
        received = self.received
        if self.cpu_priority:
            self.cpu_priority.copy_ends()
        after = os.times()
        return {"received": received, "cpu": after.user + after.system - before.user - before.system}

    def _take(self, part: slice) -> None:
        line, _ = self.listener.accept()
        self._give_way()
        with line, self.target[part] as view:
            have = 0
            while have < len(view):
                have += line.recv_into(view[have : have + (1 << 20)], 0, socket.MSG_WAITALL)
        self.received = time.monotonic()  # the last one counts

    def _send(self, port: int, part: slice) -> None:
        self._give_way()
        with socket.create_connection((_LOCAL, port)) as line, self.source[part] as view:
            for start in range(0, len(view), 4 << 20):
                line.sendall(view[start : start + (4 << 20)])

    def _give_way(self) -> None:
        if self.cpu_priority:
            self.cpu_priority.lower_this_thread()


def _start_and_join(*threads: list[threading.Thread]) -> None:
    everyone = [thread for some in threads for thread in some]
    for thread in everyone:
        thread.start()
    for thread in everyone:
        thread.join()


def main() -> None:
    settings = json.loads(sys.argv[1])
    die_with_parent(settings.pop("parent"))
    node = Node(**settings)
    calls: dict[str, Callable[..., Answer]] = {"port": node.port, "copy": node.copy}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(calls[request.pop("op")](**request)), flush=True)


if __name__ == "__main__":
    main()
