"""Calls of an operator, with the answers of AWS's agent 1.1.3 as they were recorded, and our server to compare with.

A line of the recording is one agent that knows nothing: calls that bring it to a state, then calls with what AWS's
agent showed. `ours` is where ours differs, `rows` which rows of the table in docs/launchers.md say so.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.operator_api.server import OperatorApi, serving

NODES = 2
FAULT = "a worker failed"
RECORDING = Path(__file__).parents[1] / "runtime" / "operator_api" / "hyperpodrun-1.1.3.jsonl"
_JSON = "application/json"


@dataclass(frozen=True)
class Step:
    """A call, or what workers do."""

    what: str
    """`call`; `turn`: the agent gets time; `fail`, `finish`: so do the workers."""
    path: str = ""
    method: str = "POST"
    body: str | None = None
    """Each byte as the character of its number."""
    content_type: str = _JSON
    held: bool = False
    """The agent gets no time to follow before the next step."""


@dataclass(frozen=True)
class Recorded:
    """A step with what AWS's agent showed, where ours differs, and why."""

    step: Step
    theirs: dict[str, Any]
    ours: dict[str, Any]
    rows: tuple[str, ...]

    @property
    def wanted(self) -> dict[str, Any]:
        """What ours has to show."""
        return {name: value for name, value in {**self.theirs, **self.ours}.items() if value is not None}


@dataclass(frozen=True)
class Episode:
    """From an agent that knows nothing."""

    before: tuple[Step, ...]
    recorded: tuple[Recorded, ...]


def episodes() -> Iterator[Episode]:
    """All that was recorded."""
    for line in RECORDING.read_text().splitlines():
        said = json.loads(line)
        recorded = [
            Recorded(Step(**one["step"]), one["theirs"], one.get("ours", {}), tuple(one.get("rows", ())))
            for one in said["recorded"]
        ]
        yield Episode(tuple(Step(**step) for step in said["before"]), tuple(recorded))


def shown(
    before: Mapping[str, Any], call: tuple[int, Any] | None, at_once: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> dict[str, Any]:
    """What a step has shown: code, keys and wrong fields of the answer, and each change of `/status`."""
    found: dict[str, Any] = {}
    if call is not None:
        found["code"], said = call
        found["answer"] = sorted(said) if isinstance(said, dict) else type(said).__name__
        found["wrong"] = _wrong(said)
        if isinstance(said, dict) and "status" in said:
            at_once, found["answer"] = said, None
    for when, status in (("at once", at_once), ("after", after)):
        found |= {f"{when} {name}": value for name, value in _changes(before, status or before).items()}
    return {name: value for name, value in found.items() if value is not None}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    was, now = before["transitions"], after["transitions"]
    names = {*before, *after} - {"transitions", "agent_version"}
    changed = {name: after.get(name, "gone") for name in sorted(names) if before.get(name) != after.get(name)}
    entered = sorted(name for name, when in now.items() if was.get(name) != when)
    return changed | ({"entered": entered} if entered else {})


def _wrong(said: Any) -> list[str] | None:
    """Fields of a body that a 422 names."""
    detail = said.get("detail") if isinstance(said, dict) else None
    if not isinstance(detail, list):
        return None
    return sorted({name for one in detail for name in one["loc"][1:2] if isinstance(name, str)})


class Ours:
    """Our server, with an agent that follows its orders when it gets the time to."""

    def __init__(self) -> None:
        self.runs, self.waits_for, self._ended = False, "", None
        self._api = OperatorApi(self, NODES, ())
        self._served: Any = serving(self._api, "127.0.0.1", 0)
        self.port = self._served.__enter__()

    def close(self) -> None:
        self.tell("turn")
        self._served.__exit__(None, None, None)

    def take(self, step: Step) -> dict[str, Any]:
        """What a step shows."""
        before, call, at_once = self.status(), None, None
        if step.what != "call":
            self.tell(step.what)
        else:
            call = self.call(step)
            at_once = self.status() if step.path == "/stop" else None
            if not step.held:
                self.tell("turn")
        return shown(before, call, at_once, self.status())

    def call(self, step: Step) -> tuple[int, Any]:
        """Status code, and content: parsed where it is JSON, and None where there is none."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        body = None if step.body is None else step.body.encode("latin-1")
        try:
            line.request(step.method, step.path, body, {"Content-Type": step.content_type})
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
