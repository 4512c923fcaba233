"""Asking what the durable tiers hold, again for a while where they cannot be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_ASK_AGAIN_S = 1.0
"""How soon a durable tier that cannot be reached is asked again; twice as long after each time."""
_UNREACHABLE_S = 60.0
"""How long it is asked again; the job fails then, as it must not go on from an older step."""

Excluded = tuple[tuple[str, str], ...]
"""URL and save id of checkpoints that are known already."""


class DurableQuery:
    """One question at a time, to the agent of one node.

    `send` asks the durable tiers what they hold besides those; returns which node was asked, None: nobody is there.
    """

    def __init__(self, send: Callable[[Excluded], int | None]) -> None:
        self._send = send
        self._excluded: Excluded = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._node: int | None = None

    def ask(self, excluded: Excluded) -> None:
        """What is there, besides those?"""
        self._excluded, self._asked_at, self._wait_s = excluded, time.monotonic(), _ASK_AGAIN_S
        self._repeat()

    def _repeat(self) -> None:
        self._node = self._send(self._excluded)

    def node_lost(self, node: int) -> None:
        """Ask another one, if this one was asked."""
        if node == self._node:
            self._repeat()

    def answered(self, *, reached: bool) -> bool:
        """The answer is there; whether it is to be used: else it is asked again in a while, as a tier could not be
        reached and has not had its time."""
        if not reached and self._again():
            return False
        self._node = None
        return True

    def _again(self) -> bool:
        if time.monotonic() + self._wait_s > self._asked_at + _UNREACHABLE_S:
            return False
        asyncio.get_running_loop().call_later(self._wait_s, self._repeat)
        self._wait_s *= 2
        return True
