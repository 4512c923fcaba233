"""One snapshot's parts on their way to the pieces of its group, and until these are whole."""

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
"""How long one look at a piece waits for the parts of others."""


class SentParts:
    """Holds on to a snapshot until every piece of its stripe is whole: until then it may be needed together with the
    pieces of an earlier step, or to rebuild another.

    Args:
        senders: by the rank whose node keeps the piece.
        own: the pieces of this node, of which one is of the same stripe.
        stop: whether its group is another by now.
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
        """Ranks whose nodes' pieces are not known to be whole."""

    def send(self, plan: Plan) -> int:
        """Bring each part to its node, all at the same time; returns how many bytes were sent.

        Raises:
            Superseded: they are not wanted any more.
            NotFoundError: the snapshot is not here any more, or a peer has given the piece up.
            UnreachableError: a peer is gone or takes nothing.
            CorruptSnapshotError: the snapshot is not what was sealed, or what arrived is not what was sent.
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
            check_crc(self.manifest, nbytes, joined)  # what is wrong here would be wrong in all pieces

            def work(index: int) -> None:
                rank, start, length = spans[index]
                with data[start : start + length] as part:
                    checksum = crc_text(checksums[index])
                    sent[rank] = self._senders[rank].send_part(pin, plan, self._stripe, part, checksum, self._stop)

            failures = ps.in_threads(work, len(spans), "parts")
        if failures:  # the others may only have followed
            raise next((failure for failure in failures if not isinstance(failure, Superseded)), failures[0])
        return sum(sent.values())

    def is_complete(self) -> bool:
        """Whether all pieces are whole, this node's too, after a short wait at most.

        Raises: as `send`.
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
        """The snapshot may be overwritten."""
        self._held.close()

    def _stop(self) -> bool:
        return self._stopped() or (self._pin is not None and self._pin.cancelled())
