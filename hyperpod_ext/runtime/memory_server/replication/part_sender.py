"""Sends the parts of one snapshot to the nodes of its parity group, and waits until all parity pieces are complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.replication.incoming_parts import IncomingParts
from hyperpod_ext.runtime.memory_server.replication.sender import PeerSender, Superseded
from hyperpod_ext.runtime.memory_server.slots.pins import Pin
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, check_crc, crc64nvme, crc_text, join_checksums
from hyperpod_ext.runtime.snapshot.parity import Stripe

_POLL_S = 0.2
"""Maximum seconds for which one check of a parity piece waits for other nodes' parts."""


class SentParts:
    """Sends the parts of a snapshot, and pins the snapshot until all parity pieces of its stripe are complete.

    No save may overwrite the snapshot while a piece is incomplete, because a lost rank's rebuild may need the snapshot.

    Args:
        senders: by rank, the sender to the node of each other rank in the stripe, which keeps one parity piece.
        own: the parity pieces on this node; one of them belongs to the snapshot's stripe.
        stop: returns whether the parity group has changed, so that sending must stop.
    """

    def __init__(
        self,
        regions: Regions,
        manifest: Manifest,
        stripe: Stripe,
        senders: Mapping[int, PeerSender],
        own: IncomingParts,
        stop: Callable[[], bool],
    ) -> None:
        self.manifest = manifest
        self._regions, self._stripe, self._senders, self._own = regions, stripe, senders, own
        self._owner, self._save_id = int(manifest["rank"]), str(manifest["save_id"])
        self._stopped = stop
        self._held = ExitStack()
        self._pin: Pin | None = None
        self._left = [*senders]
        """Ranks on whose nodes the parity piece may still be incomplete."""

    def send(self, plan: Plan) -> int:
        """Send each part of the snapshot to the node that keeps the part's parity piece. All parts are sent at the same
        time. Returns the number of bytes sent.

        Raises:
            Superseded: the copy was cancelled.
            NotFoundError: the snapshot is no longer on this node, or a peer has dropped its parity piece.
            UnreachableError: a peer is lost, or does not accept bytes.
            CorruptSnapshotError: the snapshot's bytes have changed since it was sealed, or received bytes differ from
                the bytes sent.
        """
        nbytes, sent = int(self.manifest["nbytes"]), dict[int, int]()
        spans = [(rank, *span) for rank, span in self._stripe.spans(self._owner, nbytes).items()]
        failures = ps.in_threads(lambda index: self._senders[spans[index][0]].connect(), len(spans), "connect")
        if failures:
            raise failures[0]
        who = f"parity of {self._stripe.ranks}"
        pin = self._pin = self._held.enter_context(self._regions.pin(self._owner, self._save_id, who))
        with pin.data as data:
            checksums = [crc64nvme(data[start : start + length]) for _, start, length in spans]
            joined = join_checksums([(sum_, length) for sum_, (_, _, length) in zip(checksums, spans, strict=True)])
            check_crc(self.manifest, nbytes, joined)  # do not send damaged bytes to the pieces

            def work(index: int) -> None:
                rank, start, length = spans[index]
                with data[start : start + length] as part:
                    checksum = crc_text(checksums[index])
                    sent[rank] = self._senders[rank].send_part(pin, plan, self._stripe, part, checksum, self._stop)

            failures = ps.in_threads(work, len(spans), "parts")
        if failures:  # raise an error that is not `Superseded`: it may have caused the others
            raise next((failure for failure in failures if not isinstance(failure, Superseded)), failures[0])
        return sum(sent.values())

    def is_complete(self) -> bool:
        """Return whether all parity pieces of the stripe are complete, including the piece on this node. Waits for at
        most 0.2 seconds.

        Raises the same errors as `send`.
        """
        assert self._pin is not None
        if self._stop():
            raise Superseded
        if self._left:
            if self._senders[self._left[0]].wait_piece(self._pin, _POLL_S, self._stop):
                del self._left[0]
            return False
        return self._own.wait_complete(self._owner, self._save_id, int(self.manifest["step"]), _POLL_S)

    def release(self) -> None:
        """Unpin the snapshot, so that a save may overwrite its slot."""
        self._held.close()

    def _stop(self) -> bool:
        return self._stopped() or (self._pin is not None and self._pin.cancelled())
