"""A node's part of bringing the newest step of a job that ends to the durable tiers, and what it tells meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from hyperpod_ext.runtime.agent.memory_client import Ask
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.memory_server.protocol.requests import UploadNow

_TELL_S = 2.0
"""How often it is told how far the step has come."""

AskHeld = Callable[[], Awaitable[tuple[c.HeldSnapshot, ...]]]


class LastStep:
    """Of one node. Every node says what it holds, hears which step that makes, and brings its part of it.

    Args:
        ask: the node's memory server.
        tell, event: messages and events for the coordinator.
    """

    def __init__(self, ask: Ask, tell: Callable[[c.LastSnapshots], None], event: Callable[..., None]) -> None:
        self._ask, self._tell, self._event = ask, tell, event
        self._named: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def name(self, save_id: str) -> None:
        """The newest snapshot that every rank has; empty: there is none."""
        if not self._named.done():
            self._named.set_result(save_id)

    async def bring(self, held: AskHeld, limit_s: float) -> None:
        """Bring this node's part, for `limit_s` at most; what of it is left out then is told.

        Raises:
            OSError, JobFailedError: the memory server is gone.
        """
        until = time.monotonic() + limit_s
        save_id = ""
        try:
            async with asyncio.timeout(limit_s):
                self._tell(c.LastSnapshots(held=await held()))
                save_id = await self._named
        except TimeoutError:  # some node does not say what it holds: what is due has to do
            pass
        while True:
            left_s = until - time.monotonic()
            progress = await self._ask(UploadNow(save_id=save_id, timeout_s=max(0.0, min(left_s, _TELL_S))))
            if progress.idle or left_s <= 0:
                break
            self._event("uploading", save_id=save_id, seconds_left=round(left_s, 1), tiers=progress.tiers)
        fields = {"in_time": progress.idle, "limit_s": limit_s, "tiers": progress.tiers}
        self._event("uploaded", save_id=save_id, **fields)
