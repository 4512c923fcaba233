"""Strangers at every port that a job listens at: they connect by the thousand, and come back when they are hung up on.

`python crowd.py SECONDS EACH TIMES AGENT_PID ...`: at most EACH at a time at each port, TIMES as many in all, and at
most `A_SECOND` new ones a second at all ports. It ends after SECONDS, or when its input is closed, and prints once a
second, in a line of JSON, how many have come to each port. Loopback only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hyperpod_ext.processes import descendants

A_SECOND = 3_000
LONGEST_S = 900.0
MOST = 1000
"""At a port, of one process: it may open only so many files."""
_LISTENS = "0A"
_TICK_S = 0.02
_LOOK_S = 5.0
"""How often it is looked for ports: of processes that strangers have open files of by the thousand, that takes long."""
_PORTS_AT_ONCE = 4
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: the connection is reset when it is closed."""
_PROOF = json.dumps({"nonce": "0" * 32, "proof": "1" * 64}).encode()
KINDS = {
    "silent": b"",
    "slow": b"\x00\x00\x04\x00",
    "garbage": bytes(random.Random(7).randbytes(300)),
    "half a handshake": struct.pack(">I", len(_PROOF)) + _PROOF[:40],
    "a replayed handshake": struct.pack(">I", len(_PROOF)) + _PROOF,
    "asks and never reads": b"GET /metrics HTTP/1.1\r\n\r\n",
    "resets": b"\x00",
}
"""What each says at first."""


def ports_of(pids: Iterable[int]) -> dict[int, int]:
    """TCP ports of this machine that the processes listen at, each with who does."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners.setdefault(str(fd.readlink()), pid)
    found: dict[int, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTENS and (owner := owners.get(f"socket:[{cells[9]}]")) is not None:
                found[int(cells[1].rpartition(":")[2], 16)] = owner
    return found


@dataclass(eq=False)
class Stranger:
    port: int
    kind: str
    socket: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    begun: bool = False


class Crowd:
    """All strangers of one job."""

    def __init__(self, agents: list[int], each: int, times: int) -> None:
        self._agents, self._each, self._in_all = agents, each, times * each
        self._selector = selectors.EpollSelector()
        self._there: Counter[int] = Counter()
        self._kinds: Iterator[str] = itertools.cycle(KINDS)
        self._ports: list[int] = []
        self._deaf: list[Stranger] = []
        """They do not even hear that they were hung up on."""
        self.began: Counter[int] = Counter()
        self.came: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        """The most at a time, by port."""

    def run(self, seconds: float) -> None:
        end, look_at, tell_at = time.monotonic() + min(seconds, LONGEST_S), 0.0, 0.0
        while (now := time.monotonic()) < end and not select.select([sys.stdin], [], [], 0)[0]:
            if now >= look_at:
                pids = [pid for agent in self._agents for pid in (agent, *descendants(agent))]
                self._ports, look_at = list(ports_of(pids)), now + _LOOK_S
            if now >= tell_at:
                tell_at = now + 1.0
                self._send_a_byte()
                print(json.dumps({"came": self.came, "most": self.most}), flush=True)
            self._come(int(A_SECOND * _TICK_S))
            for key, _ in self._selector.select(_TICK_S):
                self._hear(key.data)
            time.sleep(max(0.0, now + _TICK_S - time.monotonic()))

    def _come(self, count: int) -> None:
        wanting = [port for port in self._ports if self._there[port] < self._each and self.began[port] < self._in_all]
        fewest = sorted(wanting, key=self.began.__getitem__)[:_PORTS_AT_ONCE]
        for port in (port for port in fewest for _ in range(count // _PORTS_AT_ONCE)):
            self.began[port] += 1
            stranger = Stranger(port, next(self._kinds))
            sock = stranger.socket
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            if stranger.kind == "asks and never reads":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.connect_ex(("127.0.0.1", port))
            self._selector.register(sock, selectors.EVENT_WRITE, stranger)
            self._there[port] += 1

    def _hear(self, stranger: Stranger) -> None:
        sock = stranger.socket
        try:
            if not stranger.begun:
                sock.send(KINDS[stranger.kind])
                stranger.begun = True
                self.came[stranger.port] += 1
                self.most[stranger.port] = max(self.most[stranger.port], self._there[stranger.port])
                self._selector.modify(sock, selectors.EVENT_READ, stranger)
                if stranger.kind == "resets":
                    self._drop(stranger)
            elif stranger.kind == "asks and never reads":
                self._selector.unregister(sock)
                self._deaf.append(stranger)
            elif not sock.recv(4096):
                self._drop(stranger)
        except OSError:
            self._drop(stranger)

    def _send_a_byte(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data.kind == "slow" and key.data.begun:
                try:
                    key.data.socket.send(b"x")
                except BlockingIOError:
                    pass
                except OSError:
                    self._drop(key.data)

    def _drop(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger.socket)
        stranger.socket.close()
        self._there[stranger.port] -= 1


class Told:
    """What crowds have said of themselves."""

    def __init__(self, crowds: list[IO[str]]) -> None:
        self._crowds = crowds
        self._last: list[dict[str, dict[str, int]]] = [{"came": {}, "most": {}} for _ in crowds]

    def came(self, port: int) -> int:
        """How many strangers have come to a port so far."""
        for index, lines in enumerate(self._crowds):
            while select.select([lines], [], [], 0)[0]:
                if not (line := lines.readline()):
                    raise AssertionError(f"a crowd has left: {self}")
                self._last[index] = json.loads(line)
        return sum(last["came"].get(str(port), 0) for last in self._last)

    def __str__(self) -> str:
        came: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for last in self._last:
            came.update(last["came"])
            most.update(last["most"])
        return f"strangers that came to each port: {dict(came)}, and the most at a time: {dict(most)}"


@contextlib.contextmanager
def around(agents: list[int], *, each: int, seconds: float, times: int = 2) -> Iterator[Told]:
    """Crowds at the job of these agents for as long as this is entered."""
    processes = -(-each // MOST)
    command = [sys.executable, __file__, str(seconds), str(each // processes), str(times), *map(str, agents)]
    with contextlib.ExitStack() as stack:
        crowds: list[IO[str]] = []
        for _ in range(processes):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            assert process.stdout is not None
            crowds.append(process.stdout)
            stack.enter_context(process)
            stack.callback(process.kill)
        yield Told(crowds)


def main() -> None:
    seconds, each, times, *agents = sys.argv[1:]
    crowd = Crowd(list(map(int, agents)), int(each), int(times))
    crowd.run(float(seconds))


if __name__ == "__main__":
    main()
