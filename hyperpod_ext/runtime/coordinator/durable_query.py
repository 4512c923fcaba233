"""Asking what the durable tiers hold, again for a while where they cannot be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

_ASK_AGAIN_S = 1.0
"""How soon a durable tier that cannot be reached is asked again; twice as long after each time."""
_UNREACHABLE_S = 60.0
"""How long it is asked again; the job fails then, as it must not go on from an older step."""

Besides = Sequence[Sequence[str]]


class DurableQuestion:
    """One question at a time; `send` has it asked."""

    def __init__(self, send: Callable[[Besides], None]) -> None:
        self._send = send
        self._besides: Besides = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S

    def ask(self, besides: Besides) -> None:
        """What is there, besides those?"""
        self._besides, self._asked_at, self._wait_s = besides, time.monotonic(), _ASK_AGAIN_S
        self._send(besides)

    def repeat(self) -> None:
        """Whoever was asked is gone."""
        self._send(self._besides)

    def again(self) -> bool:
        """Ask once more, in a while; False when the tiers have had their time."""
        if time.monotonic() + self._wait_s > self._asked_at + _UNREACHABLE_S:
            return False
        asyncio.get_running_loop().call_later(self._wait_s, self.repeat)
        self._wait_s *= 2
        return True
