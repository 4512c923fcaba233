"""The agent's way to its node's memory server, and what it tells of copies to other tiers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import wire

_START_S = 30.0
_WATCH_S = 5.0
"""How often it is looked how copies to other tiers go."""

Ask = Callable[[wire.Message], Awaitable[wire.Message]]


class Break(Protocol):
    """Says that this node cannot go on."""

    def __call__(self, why: str, *, code: str = ...) -> None: ...


class MemoryLine:
    """Asks the memory server; each request has a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ended = False

    async def ask(self, request: wire.Message) -> wire.Message:
        """The answer.

        Raises:
            JobFailedError: it is gone, or refuses.
        """
        reader, writer = await self._open()
        try:
            writer.write(wire.encode(request))
            answer = await wire.read(reader)
        finally:
            writer.close()
        if answer is None or "error" in answer:
            raise JobFailedError(f"the memory server did not answer: {answer}")
        return answer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return await asyncio.open_unix_connection(self._path, limit=wire.MAX_FRAME_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):  # it is still starting
                if self.ended:
                    raise JobFailedError("the memory server of this node is gone") from None
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)


class CopyWatch:
    """Makes events of how copies to other tiers go."""

    def __init__(self, ask: Ask, event: Callable[..., None], break_node: Break) -> None:
        self._ask, self._event, self._break = ask, event, break_node
        self._known: dict[str, dict[str, Any]] = {}

    async def watch(self) -> None:
        """For as long as there is a memory server to ask."""
        with contextlib.suppress(OSError, JobFailedError):
            while True:
                await asyncio.sleep(_WATCH_S)
                await self.tell()

    async def tell(self) -> None:
        """What has changed since it was told last; a failure also to whoever reads the log of this node."""
        for status in (await self._ask({"op": "status"}))["copying"]:
            fields = copying_event(status)
            before, self._known[fields["tier"]] = self._known.get(fields["tier"], {}), fields
            if fields == before or not any(fields[key] for key in fields.keys() - {"tier"}):
                continue
            self._event("copying", **fields)
            if fields["failed"] > before.get("failed", 0):
                sys.stderr.write(f"a copy to {fields['tier']} failed: {fields['last_error']}\n")
            if status.get("taken_over"):
                self._break(f"{fields['tier']}: {fields['last_error']}", code="StaleGenerationError")


def copying_event(status: dict[str, Any]) -> dict[str, Any]:
    """What the event log keeps of how copying to one tier goes."""
    step = status.get("replicated_step") if status["tier"] == "peer" else status["durable_step"]
    keys = ("tier", "failed", "skipped", "superseded", "last_error")
    return {**{key: status[key] for key in keys}, "newest_step": step}
