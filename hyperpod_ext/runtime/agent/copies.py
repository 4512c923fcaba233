"""Reports the progress of copying snapshots to other tiers, and uploads the newest step when a job ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.memory_client import Ask, AsyncMemoryClient, held_at_last
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.memory_server.protocol import requests as r

_WATCH_S = 1.0
"""Number of seconds between two checks whether a durable tier has a new checkpoint."""
_WATCH_ALL = 5
"""Every `_WATCH_ALL`-th check reports all changes of copies. Other checks report only new steps and failures of durable
tiers."""
_PROGRESS_S = 2.0
"""Number of seconds between two progress reports while the last step is uploaded."""


class Break(Protocol):
    """Type of a function that reports to the coordinator that this node cannot continue."""

    def __call__(self, why: str, *, code: str = ...) -> None: ...


class CopyMonitor:
    """Writes events about the copying of snapshots to other tiers."""

    def __init__(self, ask: Ask, event: Callable[..., None], break_node: Break) -> None:
        self._ask, self._event, self._break = ask, event, break_node
        self._known: dict[str, dict[str, Any]] = {}

    async def watch(self) -> None:
        """Periodically report changes of copies (see `tell`), until the memory server has ended and is not replaced."""
        with contextlib.suppress(OSError, JobFailedError):
            for look in itertools.count(1):
                await asyncio.sleep(_WATCH_S)
                await self.tell(all_changes=look % _WATCH_ALL == 0)

    async def tell(self, *, all_changes: bool = True) -> None:
        """Write an event about each tier whose copies have changed since the last call, and write failures to this
        node's log.

        Args:
            all_changes: whether to report all changes, or only new steps and failures of durable tiers, which the event
                log needs soon. Copies to peers change with each step, so they are reported less often.
        """
        for status in (await self._ask(r.Status())).copying:
            fields = _event_fields(status)
            before = self._known.get(fields["tier"], {})
            if not all_changes and (fields["tier"] == "peer" or _state_of(fields) == _state_of(before)):
                continue
            self._known[fields["tier"]] = fields
            if fields == before or not any(fields[key] for key in fields.keys() - {"tier"}):
                continue
            self._event("copying", **fields)
            if fields["failed"] > before.get("failed", 0):
                sys.stderr.write(f"a copy to {fields['tier']} failed: {fields['last_error']}\n")
            if fields["fell_back"] and fields["fell_back"] != before.get("fell_back"):
                sys.stderr.write(f"copies go over TCP, not by NIXL: {fields['fell_back']}\n")
            if status.get("taken_over"):
                self._break(f"{fields['tier']}: {fields['last_error']}", code="StaleGenerationError")


def _state_of(fields: dict[str, Any]) -> tuple[int | None, int]:
    """Return the newest step in a tier, and the number of failed copies."""
    return fields.get("newest_step"), fields.get("failed", 0)


def _event_fields(status: dict[str, Any]) -> dict[str, Any]:
    step = status.get("replicated_step") if status["tier"] == "peer" else status["durable_step"]
    keys = ("tier", "failed", "skipped", "superseded", "last_error")
    return {**{key: status[key] for key in keys}, "newest_step": step, "fell_back": status.get("fell_back", "")}


class LastStep:
    """Uploads this node's part of the newest step when the job ends. All nodes first report their snapshots to the
    coordinator, which then sends the save id to upload.

    Args:
        tell: function that sends a report to the coordinator.
        event: function that sends an event to the coordinator.
    """

    def __init__(
        self,
        memory: AsyncMemoryClient,
        copies: CopyMonitor,
        tell: Callable[[c.LastSnapshots | c.Uploaded], None],
        event: Callable[..., None],
    ) -> None:
        self._memory, self.copies, self._tell, self._event = memory, copies, tell, event
        self._named: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def name(self, save_id: str) -> None:
        """Record which save to upload. `save_id`: id of the newest save of which every rank has a snapshot; empty if
        there is no such save."""
        if not self._named.done():
            self._named.set_result(save_id)

    async def upload(self, ranks: Collection[int], limit_s: float) -> None:
        """Upload this node's part of the newest step for at most `limit_s` seconds, and report to the coordinator
        whether the upload is complete.

        Args:
            ranks: ranks of this node, whose processes have ended.

        Raises:
            OSError, JobFailedError: the memory server has ended.
        """
        named = self._named = asyncio.get_running_loop().create_future()
        until = time.monotonic() + limit_s
        save_id = ""
        try:
            async with asyncio.timeout(limit_s):
                # list snapshots only after the ranks' last saves are complete
                self._tell(c.LastSnapshots(held=(await held_at_last(self._memory, ranks))[0]))
                save_id = await named
        except TimeoutError:
            # no save was chosen, because a node has not reported its snapshots: upload only snapshots that are due
            pass
        while True:
            left_s = until - time.monotonic()
            progress = await self._memory.ask(
                r.UploadNow(save_id=save_id, timeout_s=max(0.0, min(left_s, _PROGRESS_S)))
            )
            if progress.idle or left_s <= 0:
                break
            self._event("uploading", save_id=save_id, seconds_left=round(left_s, 1), tiers=progress.tiers)
        fields = {"in_time": progress.idle, "limit_s": limit_s, "tiers": progress.tiers}
        self._event("uploaded", save_id=save_id, **fields)
        await self.copies.tell()
        self._tell(c.Uploaded())

    async def finish_due(self, limit_s: float) -> None:
        """Wait for at most `limit_s` seconds until due uploads have ended. Called when the job continues without this
        node."""
        await self._memory.ask(r.WaitIdle(timeout_s=limit_s))
        await self.copies.tell()
