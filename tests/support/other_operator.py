"""A second stand-in for AWS's operator, with other habits than the first: what suits one client may be all that works.

`python other_operator.py FOLDER` keeps to the same two files, `pods.json` and `job.json`, and may be killed at any
moment. In `wants.json` somebody may say how many nodes the job is to have. Its habits: several clients poll at once,
from before any pod is there; HTTP/1.0, kept and closed connections, bodies in chunks and after a `100 Continue`;
`/start` without an `/update` before it, twice; numbers as text; fields that nobody knows, and none that may be left
out; spares that it tells nothing; ranks from the last pod to the first, and after each fault others, a new pod's first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.04
_POLLERS = 3
_TIMEOUT_S = 100.0
_GONE = "unreachable"
_PROCESS_LEVEL = "process_level_restart"
SHAPES = ("kept", "1.0", "chunked", "closed", "expects")


class Client:
    """Asks pods over HTTP, each time in another way that the protocol allows."""

    def __init__(self, port: int, first: int = 0) -> None:
        self._port, self._shapes = port, itertools.cycle((*SHAPES[first:], *SHAPES[:first]))
        self._kept: dict[str, socket.socket] = {}

    def ask(self, pod: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status code and answer.

        Raises:
            OSError: the pod is not there.
            ValueError: what it says is not HTTP, or not JSON.
        """
        shape = next(self._shapes)
        text = b"" if body is None else json.dumps(body).encode()
        connection = self._kept.pop(pod, None) if shape == "kept" else None
        if connection is not None:
            with contextlib.suppress(OSError, EOFError):  # it was closed meanwhile
                return self._exchange(connection, pod, path, text, shape)
        connection = socket.create_connection((pod, self._port), _TIMEOUT_S)
        return self._exchange(connection, pod, path, text, shape)

    def _exchange(self, connection: socket.socket, pod: str, path: str, text: bytes, shape: str) -> tuple[int, Any]:
        keeps = False
        try:
            with connection.makefile("rb") as answer:
                self._send(connection, pod, path, text, shape)
                code, content = _read(answer, until_closed=shape == "1.0")
                if code == 100:
                    connection.sendall(text)
                    code, content = _read(answer, until_closed=False)
            keeps = shape == "kept"
        finally:
            if keeps:
                self._kept[pod] = connection
            else:
                connection.close()
        return code, json.loads(content or b"{}")

    def _send(self, connection: socket.socket, pod: str, path: str, text: bytes, shape: str) -> None:
        method = "GET" if path == "/status" else "POST"
        head = [f"{method} {path} HTTP/{'1.0' if shape == '1.0' else '1.1'}", f"host: {pod}:{self._port}"]
        head += ["user-agent: other", "accept-encoding: gzip"]
        if shape == "closed":
            head.append("Connection: Close")
        if text:
            head.append("content-type: application/json; charset=utf-8")
        chunked = text and shape == "chunked"
        head.append("transfer-encoding: chunked" if chunked else f"Content-Length: {len(text)}")
        waits = text and shape == "expects"
        if waits:
            head.append("expect: 100-continue")
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        if waits:
            return  # the body is sent when it is asked for; who answers at once does not want it
        for start in range(0, len(text), 50) if chunked else ():
            part = text[start : start + 50]
            connection.sendall(f"{len(part):X}\r\n".encode() + part + b"\r\n")
        connection.sendall(b"0\r\n\r\n" if chunked else text)


def _read(answer: Any, *, until_closed: bool) -> tuple[int, bytes]:
    words = answer.readline().split(None, 2)
    if not words:
        raise EOFError
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError(f"this is no answer: {words}")
    length = 0
    while (line := answer.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    content = answer.read() if until_closed else answer.read(length)
    if len(content) < length:
        raise EOFError
    return int(words[1]), content


class Operator:
    """Brings the job from what it finds to what is wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self._job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self._client = Client(self._job["port"], first=1)

    def run(self) -> None:
        pollers = [threading.Thread(target=self._poll, args=(number,), daemon=True) for number in range(_POLLERS)]
        for poller in pollers:
            poller.start()
        while (phase := self._job["phase"]) != "over":
            getattr(self, f"_{phase}")()
            time.sleep(_POLL_S)

    def _poll(self, number: int) -> None:
        """As a dashboard, a probe and a second operator would, all the time."""
        client = Client(self._job["port"], number)
        while True:
            for pod in self._pods():
                with contextlib.suppress(OSError, EOFError):
                    code, said = client.ask(pod, "/status")
                    if code != 200 or "status" not in said:
                        self._note(pod, "/status", code, said)
            time.sleep(_POLL_S)

    # --- one look, in each phase ----------------------------------------------------------------

    def _begin(self) -> None:
        ready = [pod for pod in self._pods() if self._state(pod) == "ready"]
        if len(ready) >= self._job["nodes"]:
            self._decide(active=ready[: self._job["nodes"]][::-1], phase="start")

    def _start(self) -> None:
        said = {pod: self._status(pod) for pod in self._job["active"]}
        if any(one["status"] in ("init", "stopping") for one in said.values()):
            return  # not yet
        for turn in range(2):
            for rank, pod in enumerate(self._job["active"]):
                words = self._ranks(rank) | {"jobName": "a", "trace": {"id": [1, 2]}}
                text = {"rank": str(rank), "nnodes": str(words["nnodes"])} if turn else {}
                self._ask(pod, "/start", words | text)
        for rank, pod in enumerate(self._job["active"]):
            self._ask(pod, "/update", self._ranks(rank))
        for place, pod in enumerate(pod for pod in self._pods() if pod not in self._job["active"]):
            if place % 2:
                self._ask(pod, "/update", self._ranks(self._job["nodes"] + place) | {"spare": "true"})
        self._decide(phase="watch")

    def _watch(self) -> None:
        said = {pod: self._status(pod) for pod in self._job["active"]}
        states = {one["status"] for one in said.values()}
        if states == {"completed"}:
            self._decide(phase="end")
        elif states - {"running", "completed"}:
            asked = {one.get("restartMode") for one in said.values() if one["status"] == "faulted"}
            whole = "job_level_restart" in asked
            process = _PROCESS_LEVEL if _PROCESS_LEVEL in asked else "in_process_restart"
            mode = "job_level_restart" if whole else process
            told = [one.get("message", one["status"]) for one in said.values()]
            faults = [*self._job["faults"], {"mode": mode, "told": told, "states": sorted(states)}]
            self._decide(phase="stop", faults=faults, mode=mode, graceful=False)
        elif (wanted := self._wanted()) != self._job["nodes"]:
            self._decide(phase="stop", nodes=wanted, mode=_PROCESS_LEVEL, graceful=True)

    def _stop(self) -> None:
        body = {"restart_mode": self._job["mode"]}
        if self._job["graceful"]:
            body |= {"is_graceful": True, "timeout": "30"}
        said = {pod: self._state(pod) for pod in self._pods()}
        for pod in self._job["active"]:
            if said.get(pod) in ("running", "faulted", "completed"):
                self._ask(pod, "/stop", body)
        said = {pod: self._state(pod) for pod in self._pods()}
        alive = [pod for pod in self._job["active"] if said.get(pod, _GONE) != _GONE]
        if any(said[pod] != "ready" for pod in alive):
            return
        fewer = alive[: max(0, len(alive) - self._job["nodes"])]  # the first ones leave
        for pod in fewer:
            self._ask(pod, "/shutdown", {})
        staying = [pod for pod in alive if pod not in fewer]
        spares = [pod for pod, state in said.items() if state == "ready" and pod not in self._job["active"]]
        active = [*spares[: self._job["nodes"] - len(staying)], *staying]
        if len(active) == self._job["nodes"]:
            self._decide(active=active, phase="start", version=self._job["version"] + 1)

    def _end(self) -> None:
        for pod in self._pods():
            self._ask(pod, "/shutdown", {})
        if all(self._state(pod) == _GONE for pod in self._pods()):
            self._decide(phase="over")

    # --- what it knows --------------------------------------------------------------------------

    def _decide(self, **changes: Any) -> None:
        self._job |= changes
        draft = self._folder / "job.draft"
        draft.write_text(json.dumps(self._job))
        draft.replace(self._folder / "job.json")

    def _pods(self) -> list[str]:
        return json.loads((self._folder / "pods.json").read_text())

    def _wanted(self) -> int:
        file = self._folder / "wants.json"
        return int(json.loads(file.read_text())) if file.exists() else int(self._job["nodes"])

    def _ranks(self, rank: int) -> dict[str, Any]:
        active = self._job["active"]
        words: dict[str, Any] = {
            "rank": rank,
            "nnodes": self._job["nodes"],
            "faultCount": str(len(self._job["faults"])),
            "master_addr": active[0],
            "master_port": self._job["port"] + 100 + self._job["version"] % 50,
            "ipVersion": f"table-{self._job['version']}",
            "rankIps": [{"ip": pod, "rank": place, "node": "n"} for place, pod in enumerate(active)][::-1],
        }
        return words | ({"log_monitoring_configuration": rules} if (rules := self._job.get("log_rules")) else {})

    # --- calls ----------------------------------------------------------------------------------

    def _ask(self, pod: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            code, said = self._client.ask(pod, path, body)
        except (OSError, EOFError):
            return {"status": _GONE}
        if code != 200:
            self._note(pod, path, code, said)
        return said if isinstance(said, dict) else {}

    def _note(self, pod: str, path: str, code: int, said: Any) -> None:
        with (self._folder / "refused.jsonl").open("a") as file:
            file.write(json.dumps({"pod": pod, "path": path, "code": code, "why": said}) + "\n")

    def _status(self, pod: str) -> dict[str, Any]:
        return {"status": _GONE, **self._ask(pod, "/status")}

    def _state(self, pod: str) -> str:
        return str(self._status(pod)["status"])


if __name__ == "__main__":
    os.environ.clear()
    Operator(Path(sys.argv[1])).run()
