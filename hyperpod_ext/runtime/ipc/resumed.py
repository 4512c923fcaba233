"""Keeps the sent messages of a connection, so that they can be sent again over the next connection after a break.

Messages are not acknowledged. When the two sides connect again, each side reports how many messages it has received,
and each side sends the missing messages again. So no message is lost, and none arrives twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hyperpod_ext.runtime.ipc.messages import WireError

_KEPT = 4096
"""Number of messages to keep, which is more than socket buffers can hold."""


class Sent:
    """The newest frames sent, and the total number of frames sent."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, frame: bytes) -> None:
        """Record a frame. Call this before sending the frame."""
        self._frames.append(frame)
        self._count += 1

    def after(self, received: int) -> Sequence[bytes]:
        """Return the frames to send again to a peer that has received the first `received` frames.

        Raises:
            WireError: the frames are no longer kept, or `received` is more than the number sent.
        """
        missing = self._count - received
        if not 0 <= missing <= len(self._frames):
            raise WireError(f"the peer has received {received} messages of {self._count}: they cannot be sent again")
        return list(self._frames)[len(self._frames) - missing :]
