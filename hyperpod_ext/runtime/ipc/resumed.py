"""Keeps the newest sent messages, so that messages that were lost when a connection broke can be sent again over the
next connection.

The receiver does not acknowledge messages one by one. When the two sides connect again, each side reports how many
messages it has received, and the other side resends all later messages. So no message is lost, and no message arrives
twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hyperpod_ext.runtime.ipc.messages import WireError

_KEPT = 4096
"""Number of newest messages to keep, more than fit into socket buffers, so that every lost message is kept."""


class Sent:
    """Stores the newest frames that were sent to a peer, and counts all frames that were sent."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, frame: bytes) -> None:
        """Record a frame. Callers must call `add` before they send the frame."""
        self._frames.append(frame)
        self._count += 1

    def after(self, received: int) -> Sequence[bytes]:
        """Return the frames to send again to a peer that has received only the first `received` frames.

        Raises:
            WireError: some of these frames are no longer kept, or `received` is more than the number of frames that
                were sent.
        """
        missing = self._count - received
        if not 0 <= missing <= len(self._frames):
            raise WireError(f"the peer has received {received} messages of {self._count}: cannot send the rest again")
        return list(self._frames)[len(self._frames) - missing :]
