"""Keep the sent messages of a connection, to send them again over the next connection after a break.

Messages are not acknowledged. When the two sides connect again, each reports how many messages it has received, and
each sends the missing ones again. So no message is lost, and none arrives twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hyperpod_ext.runtime.ipc.messages import WireError

_KEPT = 4096
"""Number of kept messages: more than socket buffers hold."""


class Sent:
    """The newest sent frames, and the number of all sent frames."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, frame: bytes) -> None:
        """Record a frame before it is sent."""
        self._frames.append(frame)
        self._count += 1

    def after(self, received: int) -> Sequence[bytes]:
        """Return the frames to send again to a peer that has received the first `received` ones.

        Raises:
            WireError: those frames are no longer kept, or `received` is more than were sent.
        """
        missing = self._count - received
        if not 0 <= missing <= len(self._frames):
            raise WireError(f"the peer has received {received} messages of {self._count}: they cannot be sent again")
        return list(self._frames)[len(self._frames) - missing :]
