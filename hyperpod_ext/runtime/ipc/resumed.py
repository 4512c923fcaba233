"""What one end of a connection has sent, for a connection that takes its place when it breaks.

Nothing is acknowledged while a connection lasts. The two ends of the next one exchange how many messages they have
received, and each sends the rest again. So no message is lost, and none arrives twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hyperpod_ext.runtime.ipc.messages import WireError

_KEPT = 4096
"""More messages than socket buffers hold."""


class Sent:
    """The newest frames that were sent, and how many there were in all."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, frame: bytes) -> None:
        """A frame is about to be sent."""
        self._frames.append(frame)
        self._count += 1

    def after(self, received: int) -> Sequence[bytes]:
        """Frames to send again to a peer that has received so many.

        Raises:
            WireError: they are not kept any more, or were never sent.
        """
        missing = self._count - received
        if not 0 <= missing <= len(self._frames):
            raise WireError(f"the peer has received {received} messages of {self._count}: they cannot be sent again")
        return list(self._frames)[len(self._frames) - missing :]
