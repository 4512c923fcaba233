"""Sequences of an operator's calls, right and wrong, and the two that they are sent to: AWS's agent and ours."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hyperpodrun_env

from hyperpod_ext.runtime.operator_api.server import OperatorApi, serving

NODES = 2
FAULT = "a worker failed"
_THEIRS = Path(__file__).with_name("hyperpodrun_answers.py")
_METHODS = {"/status": "GET", "/start": "POST", "/update": "POST", "/stop": "POST", "/shutdown": "POST"}
_JSON = "application/json"


@dataclass(frozen=True)
class Step:
    """A call, or what workers do."""

    what: str
    """`call`; `turn`: the agent gets time; `fail`, `finish`: so do the workers."""
    path: str = ""
    method: str = "POST"
    body: bytes | None = None
    content_type: str = _JSON
    held: bool = False
    """The agent gets no time to follow before the next step."""

    @property
    def said(self) -> dict[str, Any]:
        """The body, where it is an object."""
        try:
            said = json.loads(self.body or b"")
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}

    def __str__(self) -> str:
        words = f"{self.method} {self.path} {(self.body or b'').decode(errors='replace')}" if self.path else self.what
        kind = f" as {self.content_type}" if self.content_type != _JSON else ""
        return words + kind + (" (held)" if self.held else "")


# --- sequences ----------------------------------------------------------------------------------

_WRONG_BODIES = (None, b"", b"null", b"{", b"[]", b"[1]", b'"start"', b"7", b"{}", b"\xff\xfe{", b'{"rank": NaN}')
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "rank": (None, "one", "", "1", 1.0, 1.5, True, [0], -1, NODES, 10**6),
    "nnodes": (None, "two", "2", 2.0, NODES + 1, 0),
    "faultCount": (None, "none", "0", "1", -1, 0.5),
    "master_addr": (None, "", 7, "some-host", "fd00::1", ["10.0.0.1"]),
    "master_port": (None, "", "12", "twelve", 1.5, 12.0, -1, True, [1]),
    "log_monitoring_configuration": (None, [], {}, "none", [1]),
    "ipVersion": (None, "", "v9", 7, [1]),
    "worker_data": (None, "data", {"rank": 1}, [1, 2]),
    "spare": (None, "yes", "true", "maybe", "", 0, 1, 2, 1.0, [True], True),
    "progress": (None, [], {}, {"tiny": {"progressCount": 3}}, "none"),
    "unknown": ("passed over",),
}
_WRONG_STOPS: dict[str, tuple[Any, ...]] = {
    "restart_mode": (None, "", "PROCESS_LEVEL_RESTART", "job_level_restart", "anything", 7, ["ipr"]),
    "is_graceful": (None, True, "yes", "maybe", 1, 2),
    "timeout": (None, 30, "30", "soon", 1.5, -1),
}


def sequences(seed: int, number: int) -> Iterator[tuple[str, list[Step]]]:
    """That many sequences, the same for the same seed, and which flag of `hyperpodrun` each is for."""
    for which in range(number):
        yield ("", "--inprocess-restart")[which % 2], _sequence(random.Random(f"{seed}/{which}"))


def _sequence(chance: random.Random) -> list[Step]:
    job, steps = _Job(chance), []
    for _ in range(chance.randint(5, 12)):
        kind = chance.choices(("right", "worker", "wrong", "twice"), (55, 12, 28, 5))[0]
        if kind == "twice" and steps:
            steps.append(steps[-1])
        elif kind == "worker":
            steps.append(Step(chance.choice(("fail", "finish"))))
        else:
            steps.append(job.wrong() if kind == "wrong" else job.right())
    return steps


@dataclass
class _Job:
    """What an operator might say next."""

    chance: random.Random
    faults: int = 0
    version: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        self.rank = self.chance.randrange(NODES)
        self.net = self.chance.choice(("10.0.0.", "10.0.0.", "fd00::"))

    def right(self) -> Step:
        path = self.chance.choices(tuple(_METHODS), (5, 40, 25, 27, 3))[0]
        if path == "/stop":
            self.faults += self.chance.random() < 0.7
            body = self.chance.choice((None, {}, {"restart_mode": "process_level_restart"}, {"is_graceful": True}))
            return self.call(path, body, held=self.chance.random() < 0.2)
        if path in ("/start", "/update"):
            self.version += self.chance.random() < 0.3
            said = self.ranks()
            if self.version == 0 and self.chance.random() < 0.15:
                said["rankIps"] = self.table()[:1]
            return self.call(path, said, held=self.chance.random() < 0.1)
        return self.call(path, None)

    def wrong(self) -> Step:
        pick = self.chance.choice
        match self.chance.choices(
            ("value", "body", "line", "ranks", "stop", "path", "method", "type"), (30, 12, *[9] * 6)
        )[0]:
            case "value":
                name = pick(tuple(_WRONG_VALUES))
                said = self.ranks()
                if self.chance.random() < 0.2:
                    said.pop(name, None)
                else:
                    said[name] = pick(_WRONG_VALUES[name])
                return self.call(pick(("/start", "/update")), said)
            case "body":
                return Step("call", pick(("/start", "/update", "/stop", "/shutdown")), body=pick(_WRONG_BODIES))
            case "line":
                return self.call(pick(("/start", "/update")), self.ranks() | {"rankIps": self.wrong_table()})
            case "ranks":
                other = {"faultCount": self.faults - 1, "rank": 1 - self.rank, "spare": True, "ipVersion": None}
                name = pick(tuple(other))
                return self.call(pick(("/start", "/update")), self.ranks() | {name: other[name]})
            case "stop":
                name = pick(tuple(_WRONG_STOPS))
                return self.call("/stop", {name: pick(_WRONG_STOPS[name])})
            case "path":
                path = pick(("/", "/else", "/start/now", "/STATUS", "/status?of=all", "/status/", "/docs"))
                return Step("call", path, pick(("GET", "POST")))
            case "method":
                return Step("call", pick(tuple(_METHODS)), pick(("GET", "POST", "PUT", "DELETE", "HEAD")))
        right = json.dumps(self.ranks()).encode()
        return Step("call", pick(("/start", "/update")), body=right, content_type=pick(("text/plain", "")))

    def wrong_table(self) -> Any:
        table = self.table()
        return self.chance.choice(
            (
                None,
                [],
                {},
                "none",
                [1],
                table[:1],
                table[1:],
                [*table, table[0]],
                [{"rank": 0}],
                [{"ip": table[0]["ip"]}],
                [{"rank": -1, "ip": table[0]["ip"]}, *table],
                [{**table[0], "rank": "0"}, table[1]],
                [{**table[0], "rank": 10**6}, *table],
                [{**table[0], "rank": NODES}, *table],
                [{**table[0], "ip": "nowhere"}, table[1]],
                [{**table[0], "ip": 7}, table[1]],
                [{**table[0], "ip": "10.9.9.9"}, {**table[1], "ip": "fd00::99"}],
            )
        )

    def table(self) -> list[dict[str, Any]]:
        return [{"rank": rank, "ip": f"{self.net}{rank + 1}"} for rank in range(NODES)]

    def ranks(self) -> dict[str, Any]:
        said = {"rank": self.rank, "nnodes": NODES, "faultCount": self.faults, "master_addr": f"{self.net}1"}
        more = {"master_port": "1234", "ipVersion": f"v{self.version}", "rankIps": self.table(), "spare": False}
        return {**said, **more}

    def call(self, path: str, said: Any, *, held: bool = False) -> Step:
        body = None if said is None else json.dumps(said).encode()
        return Step("call", path, _METHODS[path], body, held=held)


# --- the two that are asked -----------------------------------------------------------------------


class Asked:
    """A server, and the agent behind it."""

    port = 0

    def new(self, flag: str = "") -> None:
        """Another agent, that knows nothing, of `hyperpodrun` with this flag."""
        raise NotImplementedError

    def tell(self, what: str) -> None:
        """`turn`: follow what was ordered, until there is nothing to do; `fail`, `finish`: so do the workers."""
        raise NotImplementedError

    def call(self, step: Step) -> tuple[int, Any]:
        """Status code, and content: parsed where it is JSON, and None where there is none."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        try:
            line.request(step.method, step.path, step.body, {"Content-Type": step.content_type})
            answer = line.getresponse()
            text = answer.read()
        finally:
            line.close()
        try:
            return answer.status, json.loads(text) if text else None
        except ValueError:
            return answer.status, text.decode(errors="replace")

    def status(self) -> dict[str, Any]:
        code, said = self.call(Step("call", "/status", "GET"))
        assert code == 200
        return said


class Theirs(Asked):
    """AWS's agent, in a process of its environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._answer())

    def new(self, flag: str = "") -> None:
        self.tell(f"new {flag}".strip())

    def tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said, f"AWS's agent has ended with {self._process.wait()}"
        return said


class Ours(Asked):
    """Our server, with an agent that does what it is told when it gets the time to."""

    def __init__(self) -> None:
        self._served: Any = None
        self.runs, self.waits_for = False, ""
        self.new()

    def new(self, flag: str = "") -> None:
        self.close()
        self.runs, self._ended = False, None
        self._api = OperatorApi(self, NODES, ())
        self._served = serving(self._api, "127.0.0.1", 0)
        self.port = self._served.__enter__()

    def close(self) -> None:
        if self._served is not None:
            self.tell("turn")
            self._served.__exit__(None, None, None)
            self._served = None

    def tell(self, what: str) -> None:
        if what != "turn":
            self.runs = False
            self._api.job_ended(succeeded=what == "finish", message=FAULT, restart_mode="process_level_restart")
        assert self._api._loop is not None
        asyncio.run_coroutine_threadsafe(self._turn(), self._api._loop).result()

    async def _turn(self) -> None:
        if self._ended is not None:
            self._ended.set()
        await asyncio.gather(*self._api._work)

    def begin(self, place: Any) -> None:
        self.runs = True

    def resume(self, nodes: int, replaced: object) -> None:
        assert self.runs

    def pause(self) -> None:
        assert self.runs

    async def rest(self, limit_s: float) -> None:
        assert self.runs

    async def end(self) -> None:
        self._ended = asyncio.Event()
        await self._ended.wait()
        self.runs = False

    def leave(self) -> None:
        self.runs = False

    def note(self, **fields: Any) -> None:
        """There is no event log."""


@contextmanager
def both() -> Iterator[tuple[Asked, Asked]]:
    """AWS's agent and ours. Skips the test where the first cannot be installed."""
    python = hyperpodrun_env.hyperpodrun().with_name("python")
    with subprocess.Popen(
        [python, _THEIRS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        ours = Ours()
        try:
            yield Theirs(process), ours
        finally:
            ours.close()
            process.kill()
