"""Copies this node's snapshots to the memory of other nodes, in a background thread.

The snapshots of one step of all ranks on this node are copied together, because only replicas of the same step can be
restored. The copies of a step begin only when no rank of this node is still writing its snapshot of an earlier step. If
copies of a step began while a rank still wrote an earlier step, a peer might have no step of all ranks.

The newest snapshot with replicas stays on this node until the next snapshot has replicas, because a node with a replica
may be lost. A snapshot with replicas stays until a newer snapshot has replicas and another copy begins, unless a save
needs its slot. The older snapshot is needed if a slower node is lost while it copies the newer step: only the older
step then exists for all ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.config.checkpoint import PeerTier
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.membership.placement import Placement, place_replicas
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.incoming_parts import IncomingParts
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlTransfer
from hyperpod_ext.runtime.memory_server.replication.parity_group import ParityGroup
from hyperpod_ext.runtime.memory_server.replication.part_sender import SentParts
from hyperpod_ext.runtime.memory_server.replication.rate_limit import RateLimit
from hyperpod_ext.runtime.memory_server.replication.sender import PeerSender, Superseded
from hyperpod_ext.runtime.memory_server.slots.pins import Hold, Pin
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest

Address = tuple[str, int]

_NAMED = 16
"""Number of requested steps to remember, few because a step is requested only shortly before it is saved."""
_SEALED = 4
"""Number of a rank's last snapshots that a late copy request may refer to: about as many as the memory tier keeps."""


@dataclass(eq=False, slots=True)
class _Step:
    """One step whose snapshots are due to be copied."""

    save_id: str
    number: tuple[int, int]
    """Generation and step of the snapshots."""
    waiting: dict[int, Manifest] = field(default_factory=dict)
    begun: bool = False
    sent: dict[int, SentParts] = field(default_factory=dict)
    """With parity, by rank: snapshots whose parts were sent, but whose parity pieces may still be incomplete."""
    at_once: bool = False
    """Whether to begin the copies even if other ranks are still writing their snapshots of earlier steps."""
    nbytes: int = 0
    pins: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A pinned snapshot that has replicas or complete parity."""

    save_id: str
    pin: Pin
    held: ExitStack


class Replicator:
    """Copies snapshots to the nodes that `place_replicas` chooses. With parity, sends parts of each snapshot to the
    nodes of the parity group instead.

    Args:
        regions: this node's own snapshots.
        plan_of: returns a plan by its digest.
        tier: the peer tier's settings: interval, number of copies, number of connections, and allowed slowdown of
            training.
        cpu_priority: sets the CPU priority of copies.
        node: this node's number.
        parts: the parity pieces on this node; None if the tier does not use parity.
        when_busy: what to do if a step is due while an earlier step is still being copied.
        nixl: transfers copies with NIXL if NIXL works; None if NIXL is not configured.
    """

    def __init__(
        self,
        regions: Regions,
        plan_of: Callable[[str], Plan],
        tier: PeerTier,
        *,
        node: int,
        secret: bytes,
        cpu_priority: CpuPriority,
        parts: IncomingParts | None = None,
        when_busy: WhenBusy = "supersede",
        timeout_s: float = ps.TIMEOUT_S,
        encrypted: bool = False,
        nixl: NixlTransfer | None = None,
    ) -> None:
        self._encrypted, self._nixl = encrypted, nixl
        self._regions, self._plan_of, self._tier, self._node = regions, plan_of, tier, node
        self._secret, self._when_busy, self._timeout_s = secret, when_busy, timeout_s
        self.rate_limit, self._cpu_priority = RateLimit(tier.max_slowdown), cpu_priority
        self._peers: dict[int, PeerSender] = {}
        self._placement: Placement = {}
        self._targets: tuple[int, ...] = ()
        self._parts = parts
        self._group: ParityGroup | None = None
        self._group_number = 0
        """Counter of changes of the parity group and of its memory servers."""
        self._due: list[_Step] = []
        self._closed = False
        self._skipped = ""
        self._asked: deque[int] | None = None
        """Newest steps that were requested to be copied; None if the tier's own interval applies."""
        self._sealed: dict[int, deque[Manifest]] = {}
        self._behind: set[int] = set()
        """Ranks whose newest snapshot is provisional, and is copied once the rank has confirmed it."""
        self._writing: dict[int, tuple[int, int]] = {}
        """Generation and step of the snapshot that each rank is writing, by rank."""
        self._superseded = (0, 0)
        """Generation and number of the newest step whose copy was cancelled. A snapshot of this step that is sealed
        later is not copied."""
        self._copying = False
        self._kept: dict[int, _Kept] = {}
        """For each rank on this node, the pinned newest snapshot with replicas."""
        self._kept_before: dict[int, _Kept] = {}
        """For each rank, the last snapshot with replicas before the snapshot in `_kept`, pinned until another copy
        begins."""
        self._done: dict[int, _Kept] = {}
        """With parity, by rank: snapshots with complete parity, of a step whose parity is still incomplete for other
        ranks on this node."""
        self._stepped_at: dict[int, tuple[float, float]] = {}
        self._due_at, self._latest = 0.0, _Step("", (0, 0))
        self._changed = threading.Condition()
        self._counts = dict.fromkeys(("copies", "bytes_sent", "superseded", "skipped", "failed"), 0)
        self._seconds = 0.0
        self._replicated_step: int | None = None
        self._last_error: str | None = None
        threading.Thread(target=self._run, name="replicate", daemon=True).start()

    # --- due steps ------------------------------------------------------------------------------

    def stepped(self, owner: int) -> None:
        """Record that a rank has made a step. The time since the rank's last step is used to measure how much copies
        slow down training."""
        now, sending = time.monotonic(), self.rate_limit.sending_s()
        before, sending_before = self._stepped_at.get(owner, (None, 0.0))
        self._stepped_at[owner] = now, sending
        if before is not None and now > before:
            self.rate_limit.observe_step(now - before, (sending - sending_before) / (now - before))

    def begun(self, owner: int, generation: int, step: int) -> None:
        """Record that a rank has begun to write its snapshot of a step."""
        with self._changed:
            stale = [rank for rank, number in self._writing.items() if number[0] < generation]
            for rank in stale:  # a snapshot that was begun in an older generation is never sealed
                del self._writing[rank]
            self._writing[owner] = generation, step
            self._changed.notify_all()

    def left_out(self, owner: int) -> None:
        """Record that the snapshot that a rank is writing will not be copied."""
        with self._changed:
            self._writing.pop(owner, None)
            self._changed.notify_all()

    def sealed(self, owner: int, manifest: Manifest) -> None:
        """Record that a rank's snapshot is sealed (complete), and copy the snapshot if its step is due."""
        with self._changed:
            self.left_out(owner)
            self._sealed.setdefault(owner, deque(maxlen=_SEALED)).append(manifest)
            if self._is_due(int(manifest["step"])):
                self._take_due(owner, manifest)
            elif owner in self._behind and self._targets:
                self._take(owner, manifest, again=True)
            self._behind.discard(owner)

    def ask(self, step: int) -> None:
        """Copy the snapshots of `step`, including snapshots that are already sealed. From now on, copy only requested
        steps."""
        with self._changed:
            if step in (self._asked or ()):
                return
            before = self._is_due(step)
            self._asked = deque([*(self._asked or ()), step], maxlen=_NAMED)
            for owner, sealed in self._sealed.items():
                late = [manifest for manifest in sealed if manifest["step"] == step]
                if late and not before:
                    self._take_due(owner, late[-1])

    def go_by(self, step: int | None) -> None:
        """Begin a generation of the job in which all nodes copy the same steps. `step` is the step that was requested
        last, or None if the tier's own interval applies."""
        with self._changed:
            self._asked = None if step is None else deque([step], maxlen=_NAMED)
            self._sealed.clear()

    def _is_due(self, step: int) -> bool:
        return step % self._tier.every_steps == 0 if self._asked is None else step in self._asked

    def _take_due(self, owner: int, manifest: Manifest) -> None:
        self._forget_kept(owner)
        if self._targets:
            self._take(owner, manifest)

    def catch_up(self, owner: int, manifest: Manifest) -> None:
        """Copy a snapshot at once and at full speed, even if it is not due, because this node may leave soon. Does
        nothing with parity, because a parity piece needs the parts of all nodes in the group."""
        with self._changed:
            if self._targets and self._parts is None:
                self.rate_limit.unthrottle()
                self._cpu_priority.unthrottle()
                self._take(owner, manifest, again=True)
                self._expect(owner)

    def _expect(self, owner: int) -> None:
        if self._regions.has_provisional(owner):
            self._behind.add(owner)

    def set_peers(
        self,
        addresses: Mapping[int, Address],
        domains: Mapping[int, str] | None = None,
        group: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Set the job's nodes and their failure domains. If a memory server with replicas of this node's snapshots was
        lost or restarted, the newest snapshots are copied again at once.

        `group` has the ranks of each node in this node's parity group. A changed group makes new pieces at the next due
        step.
        """
        with self._changed:
            gone = {node for node, peer in self._peers.items() if addresses.get(node) != peer.address}
            for node in gone:
                self._peers.pop(node).close()
            for node in addresses.keys() - self._peers.keys() - {self._node}:
                self._peers[node] = self._sender(addresses[node])
            for peer in self._peers.values():
                peer.try_nixl_again()
            if self._parts is not None:
                self._set_group(ParityGroup.of(self._node, group or {}), self._parts, gone)
                return
            nodes = {node: (domains or {}).get(node, "") for node in {*addresses, self._node}}
            self._placement = place_replicas(nodes, self._tier.replicas, self._placement)
            before, self._targets = self._targets, self._placement[self._node]
            if set(self._targets) - (set(before) - gone):
                for owner in self._regions.owners():
                    if (manifest := self._regions.newest(owner)) is not None:
                        self._take(owner, manifest, again=True)
                    self._expect(owner)

    def _set_group(self, group: ParityGroup | None, parts: IncomingParts, gone: set[int]) -> None:
        if group is not None and not set(group.others) <= self._peers.keys():
            group = None  # the address of a node in the parity group is unknown
        replaced = group != self._group or (group is not None and bool(gone & group.ranks.keys()))
        self._group_number += replaced
        self._group, self._targets = group, group.others if group is not None else ()
        parts.set_group(group, replaced=replaced)

    def _sender(self, address: Address) -> PeerSender:
        return PeerSender(
            *address,
            secret=self._secret,
            streams=self._tier.streams,
            rate_limit=self.rate_limit,
            cpu_priority=self._cpu_priority,
            timeout_s=self._timeout_s,
            encrypted=self._encrypted,
            nixl=self._nixl,
        )

    def _take(self, owner: int, manifest: Manifest, *, again: bool = False) -> None:
        save_id = str(manifest["save_id"])
        step = next((due for due in self._due if due.save_id == save_id), None)
        if step is None:
            step = _Step(save_id, (int(manifest["generation"]), int(manifest["step"])), at_once=again)
            if not again and step.number <= self._superseded:
                return
            if self._when_busy == "skip" and not again and self._skips(save_id):
                return
            if self._when_busy == "supersede":
                for older in [due for due in self._due if not due.begun and due.number < step.number]:
                    self._remove(older)
                    self._superseded = max(self._superseded, older.number)
                    self._counts["superseded"] += 1
            if not again and save_id != self._latest.save_id:
                self._learn_interval(step)
            self._due.append(step)
        if self._when_busy == "wait" and not again:
            with suppress(NotFoundError):
                step.pins.enter_context(self._regions.pin(owner, save_id, "to be replicated", hold=Hold.WAITING))
        step.waiting[owner] = manifest
        step.nbytes += int(manifest["nbytes"])
        self._changed.notify_all()

    def _skips(self, save_id: str) -> bool:
        """Return whether to skip a step for all ranks on this node, because an earlier step is still being copied."""
        if save_id != self._skipped and (not self._due or save_id == self._latest.save_id):
            return False
        self._counts["skipped"] += save_id != self._skipped
        self._skipped = save_id
        return True

    def _learn_interval(self, step: _Step) -> None:
        """Measure the interval between two due steps, within which the copies of a step must be done."""
        now = time.monotonic()
        if self._latest.nbytes:
            copies = len(self._targets) if self._parts is None else 1
            self.rate_limit.finish_within(self._latest.nbytes * copies, now - self._due_at)
            self._cpu_priority.timeout_s = (now - self._due_at) / 2
        self._latest, self._due_at = step, now

    def _remove(self, step: _Step) -> None:
        self._due.remove(step)
        step.pins.close()

    # --- copying --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed or (step := self._next()) is None:
                    return
                if not step.begun:  # `CpuPriority` has one time limit for the copies of all ranks
                    step.begun = True
                    self._cpu_priority.copy_begins()
                self._copying = True
            if step.waiting:
                self._copy_next(step)
            else:
                self._look_at_pieces(step)
            with self._changed:
                self._copying = False
                if not step.waiting and not step.sent:
                    self._remove(step)
                    self._cpu_priority.copy_ends()
                self._changed.notify_all()

    def _copy_next(self, step: _Step) -> None:
        with self._changed:
            manifest = step.waiting.pop(owner := min(step.waiting))
            self._let_go_before(owner)
            targets, parts = [self._peers[node] for node in self._targets], self._sent_parts(manifest)
        began = time.monotonic()
        failures = self._copy(owner, manifest, targets) if self._parts is None else self._send_parts(parts)
        with self._changed:
            self._seconds += time.monotonic() - began
            if parts is None or failures:
                self._conclude(owner, manifest, failures)
            else:
                step.sent[owner] = parts

    def _next(self) -> _Step | None:
        """Return the oldest due step, once no rank on this node is still writing a snapshot of an earlier step."""
        first = min(self._due, key=lambda step: (not step.begun, step.number), default=None)
        if first is None or first.begun or first.at_once:
            return first
        return None if any(number < first.number for number in self._writing.values()) else first

    def _copy(self, owner: int, manifest: Manifest, targets: list[PeerSender]) -> list[BaseException]:
        """Copy a snapshot to all nodes in `targets` at the same time. Returns the errors of the failed copies."""
        save_id = str(manifest["save_id"])

        def work(index: int) -> None:
            peer = targets[index]
            peer.connect()  # connect before pinning the slot: connecting may take long
            with self._regions.pin(owner, save_id, f"replicate to {peer}") as pin:
                sent = peer.send(pin, self._plan_of(str(manifest["plan"])))
            with self._changed:
                self._counts["bytes_sent"] += sent

        self.rate_limit.copy_begins()
        try:
            return ps.in_threads(work, len(targets), "replicate")
        finally:
            self.rate_limit.copy_ends()

    # --- parity -----------------------------------------------------------------------------------

    def _sent_parts(self, manifest: Manifest) -> SentParts | None:
        """Return an object that sends the parts of this snapshot to the parity group; None without a parity group."""
        group, number = self._group, self._group_number
        stripe = group.stripe(int(manifest["rank"])) if group is not None else None
        if self._parts is None or group is None or stripe is None:
            return None
        senders = {rank: self._peers[group.node_of(rank)] for rank in stripe.others(int(manifest["rank"]))}
        return SentParts(
            self._regions,
            manifest,
            stripe,
            senders,
            self._parts,
            lambda: self._closed or self._group_number != number,
        )

    def _send_parts(self, parts: SentParts | None) -> list[BaseException]:
        """Send the parts of a snapshot to the nodes of the parity group. Returns the errors, or an empty list."""
        if parts is None:
            return [NotFoundError("this node is in no parity group at the moment")]
        self.rate_limit.copy_begins()
        try:
            sent = parts.send(self._plan_of(str(parts.manifest["plan"])))
        except Exception as error:  # catch any error: later steps can still be copied
            parts.release()
            return [error]
        finally:
            self.rate_limit.copy_ends()
        with self._changed:
            self._counts["bytes_sent"] += sent
        return []

    def _look_at_pieces(self, step: _Step) -> None:
        """Check whether the parity pieces for one rank's snapshot are complete. Until the pieces are complete, the
        rank's last snapshot with complete pieces stays pinned too, because other nodes of the group may still need the
        older step."""
        owner, parts = min(step.sent.items())
        failures: list[BaseException] = []
        try:
            if not parts.is_complete():
                return
        except Exception as error:
            failures.append(error)
        with self._changed:
            del step.sent[owner]
            self._conclude(owner, parts.manifest, failures)
            parts.release()

    def _conclude(self, owner: int, manifest: Manifest, failures: list[BaseException]) -> None:
        if not failures:
            self._counts["copies"] += 1
            self._replicated_step = int(manifest["step"])
            self._regions.mark(owner, str(manifest["save_id"]), State.REPLICATED)
            if self._parts is None:
                self._keep(owner, str(manifest["save_id"]))
            else:
                self._keep_together(owner, str(manifest["save_id"]))
        elif all(isinstance(failure, Superseded | NotFoundError) for failure in failures):
            self._counts["superseded"] += 1
        else:
            self._counts["failed"] += 1
            self._last_error = "; ".join(str(failure) or repr(failure) for failure in failures)

    def _keep(self, owner: int, save_id: str) -> None:
        """Pin a snapshot that now has replicas. The previous snapshot with replicas also stays pinned until a save
        needs its slot."""
        self._let_go_before(owner)
        if (before := self._kept.pop(owner, None)) is not None:
            before.pin.hold = Hold.KEPT_BEFORE
            self._kept_before[owner] = before
        with suppress(NotFoundError):
            self._kept[owner] = self._hold(owner, save_id, "has replicas")

    def _hold(self, owner: int, save_id: str, why: str) -> _Kept:
        held = ExitStack()
        pin = held.enter_context(self._regions.pin(owner, save_id, f"{save_id} {why}", hold=Hold.KEPT))
        return _Kept(save_id, pin, held)

    def _let_go_before(self, owner: int) -> None:
        """Unpin the older of a rank's two pinned snapshots with replicas."""
        if (before := self._kept_before.pop(owner, None)) is not None:
            before.held.close()

    def _keep_together(self, owner: int, save_id: str) -> None:
        """Pin a snapshot whose parity is complete. Once parity is complete for every rank on this node, unpin the
        earlier step's snapshots.

        The older snapshots of all ranks are unpinned together. If some ranks had only the newer step and other ranks
        only the older step, the group could restore neither step.
        """
        for rank in [rank for rank, its in self._done.items() if its.save_id != save_id]:
            self._done.pop(rank).held.close()
        with suppress(NotFoundError):
            self._done[owner] = self._hold(owner, save_id, "has parity")
        ranks = self._group.ranks[self._node] if self._group is not None else ()
        if ranks and set(ranks) <= self._done.keys():
            before, self._kept, self._done = self._kept, self._done, {}
            for kept in before.values():
                kept.held.close()

    def _forget_kept(self, owner: int) -> None:
        """Forget a rank's pinned snapshots that no longer exist, because a new generation has dropped their steps."""
        for kept in (self._kept, self._kept_before, self._done):
            if owner in kept:
                try:
                    self._regions.open_manifest(owner, kept[owner].save_id)
                except NotFoundError:
                    kept.pop(owner).held.close()

    def let_go(self, owners: Collection[int]) -> None:
        """Unpin the snapshots of ranks that have moved to another node or have new rank numbers."""
        with self._changed:
            for kept in (self._kept, self._kept_before, self._done):
                for owner in kept.keys() & set(owners):
                    kept.pop(owner).held.close()

    # --- status ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return counters of copies, the last error, and whether there are too few nodes for the configured copies."""
        with self._changed:
            return {
                "tier": "peer",
                "targets": list(self._targets),
                "too_few_nodes": len(self._targets) < (2 if self._parts is not None else self._tier.replicas),
                "replicated_step": self._replicated_step,
                **self._counts,
                "seconds": self._seconds,
                "limit_bytes_per_s": None if math.isinf(self.rate_limit.rate) else int(self.rate_limit.rate),
                "last_error": self._last_error,
                "fell_back": "; ".join(f"{peer}: {peer.fell_back}" for peer in self._peers.values() if peer.fell_back),
            }

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all due copies have arrived or failed. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._due, timeout_s)

    def close(self) -> None:
        """Stop sending copies."""
        with self._changed:
            self._closed = True
            for peer in self._peers.values():
                peer.close()
            self._changed.notify_all()
