"""The state of one memory server: snapshots of its node's ranks and of peers, and running copies to other tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.errors import MemoryTierFullError, NotFoundError
from hyperpod_ext.runtime.memory_server.node_disk import NodeDisk
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.protocol.requests import (
    DurableCheckpoints,
    Enter,
    SaveRecord,
    ServerStatus,
    UploadProgress,
)
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.incoming_parts import IncomingParts
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlTransfer
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.replication.replicator import Replicator
from hyperpod_ext.runtime.memory_server.restore_cache import RestoreCache
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.slots.slots import MIN_SLOTS
from hyperpod_ext.runtime.memory_server.uploader import Uploader
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest

if TYPE_CHECKING:
    from hyperpod_ext.runtime.memory_server.event_log import NodeEventLog


class NodeMemory:
    """One node's snapshots in memory, and the copies of these snapshots to all other tiers.

    Args:
        policy: checkpoint policy, which defines the tiers and their intervals.
        node, nodes, owners: this node's number, the number of nodes, and the number of ranks per node.
        most_nodes: maximum number of nodes after a resize, or None if the number of nodes never changes.
        group: file of this process's CPU scheduling group; see `CpuPriority`.
        encrypted: whether connections to other nodes use TLS.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        job: str,
        secret: bytes,
        node: int,
        nodes: int,
        owners: int,
        usable_bytes: Callable[[], int],
        most_nodes: int | None = None,
        group: Path | None = None,
        encrypted: bool = False,
    ) -> None:
        self._encrypted = encrypted
        self.policy, self._job, self._secret = policy, job, secret
        memory = policy.memory()
        limit = memory.budget_mib << 20 if memory is not None and memory.budget_mib is not None else None
        self._budget = Budget(limit, usable_bytes)
        self._node = node
        self.number = node
        """This node's current number, which can change between two runs in a job without our agent."""
        self.event_log: NodeEventLog | None = None
        slots = slots_of(policy)
        self.own = Regions(kind="own", job=job, secret=secret, budget=self._budget, slots=slots)
        self.replicas = Regions(kind="replica", job=job, secret=secret, budget=self._budget, slots=MIN_SLOTS)
        self.plans = Plans(self._plans_in_use)
        self.uploaders = [
            Uploader(
                tier,
                self.own,
                self.plans.get,
                job=job,
                secret=secret,
                node=node,
                nodes=nodes,
                owners=owners,
                when_busy=policy.when_busy,
            )
            for tier in policy.durable()
        ]
        self.peer_server: PeerServer | None = None
        self.replicator: Replicator | None = None
        self._alone = (most_nodes or nodes) == 1
        peer = policy.peer()
        self._cpu_priority = CpuPriority(peer.max_slowdown if peer is not None else 1.0, group)
        by_nixl = peer is not None and peer.transport == "nixl" and not self._alone and not encrypted
        self._nixl = NixlTransfer(self._cpu_priority) if by_nixl else None
        self.parts: IncomingParts | None = None
        """Parity pieces (XOR of parts of other nodes' snapshots) on this node; None if the peer tier uses no parity."""
        if peer is not None and peer.parity is not None and not self._alone:
            pieces = Regions(kind="parity", job=job, secret=secret, budget=self._budget, slots=MIN_SLOTS)
            self.parts = IncomingParts(pieces, self._cpu_priority)
        if peer is not None and not self._alone:
            self.replicator = Replicator(
                self.own,
                self.plans.__getitem__,
                peer,
                node=node,
                secret=secret,
                cpu_priority=self._cpu_priority,
                parts=self.parts,
                when_busy=policy.when_busy,
                encrypted=encrypted,
                nixl=self._nixl,
            )
        self._peers: dict[int, tuple[str, int]] = {}
        self._servers_lost = 0
        self._provisional: dict[int, Manifest] = {}
        self._departed: set[int] = set()
        """Ranks that moved to other nodes in a resize, and whose memory on this node is freed once no copy reads it."""
        self._restore_cache = RestoreCache(self.uploaders, self._budget, self.plans)
        self.disk = NodeDisk(self.uploaders, self._restore_cache, self.plans)

    def _plans_in_use(self) -> set[str]:
        """Return the digests of the plans that snapshots and parity pieces on this node use."""
        held = [*self.own.manifests(), *self.replicas.manifests()]
        pieces = self.parts.pieces.manifests() if self.parts is not None else []
        held += [manifest for piece in pieces for manifest in piece["manifests"].values()]
        return {str(manifest["plan"]) for manifest in held}

    def map(self, owner: int, slot_bytes: int) -> tuple[Region, int]:
        """Return a rank's region of shared memory, and a file descriptor of the region. If memory is short, frees
        snapshots that were fetched for a restore.

        Raises:
            MemoryTierFullError: the node has not enough memory; existing snapshots are kept.
        """
        self._departed = self._departed - {owner}  # the rank has moved back to this node
        try:
            return self.own.map(owner, slot_bytes)
        except MemoryTierFullError:
            if not self._restore_cache.forget():
                raise
            return self.own.map(owner, slot_bytes)

    def seal(self, owner: int, slot: int, record: SaveRecord) -> Manifest:
        """Seal a snapshot (compute its checksum and sign it), and copy it to the tiers for which its step is due. A
        provisional snapshot is copied only after `resolve` has confirmed it."""
        self.plans[record.plan]
        with self._cpu_priority.urgent():
            fields = record.model_dump(exclude={"provisional"})
            manifest = self.own.seal(owner, slot, fields, provisional=record.provisional)
        if record.provisional:
            self._provisional[owner] = manifest
        else:
            self._send_on(owner, manifest)
        self._restore_cache.forget()
        self._drop_departed()
        return manifest

    def resolve(self, owner: int, save_id: str, *, keep: bool) -> None:
        """If `keep`, confirm a provisional snapshot and copy it to the tiers for which its step is due; otherwise drop
        it."""
        manifest = self._provisional.pop(owner, None)
        if manifest is None or manifest["save_id"] != save_id:
            return
        if keep:
            self.own.keep(owner, save_id)
            self._send_on(owner, manifest)
        else:
            self.own.take_back(owner, save_id)
            if self.replicator is not None:
                self.replicator.left_out(owner)

    def _send_on(self, owner: int, manifest: Manifest) -> None:
        """Copy a snapshot to the slower tiers for which the snapshot's step is due."""
        for uploader in self.uploaders:
            uploader.sealed(owner, manifest)
        # state that is equal on all data-parallel ranks needs no replicas, because every node has the same state
        if self.replicator is not None and manifest["extras"].get("sharing") != "same":
            self.replicator.sealed(owner, manifest)
        elif self.replicator is not None:
            self.replicator.left_out(owner)

    def stepped(self, owner: int) -> None:
        """Record that a rank has made a step, to measure how much copies slow down training."""
        if self.replicator is not None:
            self.replicator.stepped(owner)

    def begin(self, owner: int, slot: int, step: int, save_id: str, generation: int) -> None:
        """Allow a rank to write to a slot; see `Regions.begin`."""
        self.stepped(owner)
        self.own.begin(owner, slot, step, save_id, generation)
        if self.replicator is not None:
            self.replicator.begun(owner, generation, step)

    def fence(
        self, generation: int, step: int | None, run: str, stored: Collection[str] = (), *, again: bool = True
    ) -> None:
        """Begin a new generation: refuse writes from earlier generations, and drop their snapshots after `step`.

        Args:
            step: step after which the generation begins; None if the step is not decided yet, so that no snapshot is
                dropped.
            run: name of this run of the job; empty to leave the name unchanged.
            stored: the durable tiers that already have `step`, by URL.
            again: whether the new generation saves `step` once more.
        """
        self.disk.run = run or self.disk.run
        self.own.fence(generation, step)
        self.replicas.fence(generation, step)
        if self.parts is not None:
            self.parts.fence(generation, step)
        if step is not None:
            for uploader in self.uploaders:
                there = stored if self.disk.may_have(uploader, step) else ()
                uploader.enter(generation, step, run, there, again=again)

    def enter(self, order: Enter) -> None:
        """Begin a new generation on a node without our agent."""
        self.number, self.disk.run = order.node, order.run
        if self.event_log is not None:
            self.event_log.enter(order.first)
        for uploader in self.uploaders:
            # rank and node numbers may have changed between two runs
            uploader.resize(order.node, order.nodes, order.owners)
            # `again` is false here, because a `Fence` request follows if `base` is saved again
            uploader.enter(order.generation, order.base, order.run, stored=(), again=False)
        for regions in (self.own, self.replicas):
            regions.fence(order.generation, order.drop)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Free the memory of all ranks except `ranks`, because all other ranks belong to earlier runs. Does nothing
        while copies are running, so the caller must try again later."""
        left = [owner for owner in self.own.owners() if owner not in ranks]
        if left and self.wait_idle(0):
            for owner in left:
                self.own.drop(owner)

    def rescale(self, nodes: int, owners: int) -> None:
        """Set the number of nodes and the number of this node's ranks. Running uploads keep the numbers that were valid
        when their checkpoint was saved."""
        for uploader in self.uploaders:
            uploader.resize(self._node, nodes, owners)

    def release_departed(self, ranks: Collection[int], world_size: int) -> None:
        """Free the memory of ranks that moved from this node to other nodes in a resize. Memory that is being copied is
        freed after a later save."""
        self._departed = set(self.own.owners()) - set(ranks)
        if self.replicator is not None:
            self.replicator.let_go(self._departed)
        self._drop_departed()
        for owner in self.replicas.owners():
            if owner >= world_size or owner in ranks:
                self.replicas.drop_unused(owner)
        if self.parts is not None:
            for owner in set(self.parts.pieces.owners()) - set(ranks):
                self.parts.pieces.drop_unused(owner)

    def _drop_departed(self) -> None:
        if not self._departed:
            return
        for owner in self._departed:
            self.own.drop_unused(owner)
        self._departed = self._departed.intersection(self.own.owners())

    def held(self) -> list[dict[str, Any]]:
        """Return summaries of all complete snapshots on this node, both own snapshots and replicas."""
        own = [{**summary, "replica": False} for summary in self.own.held()]
        return own + [{**summary, "replica": True} for summary in self.replicas.held()]

    def held_pieces(self) -> list[dict[str, Any]]:
        """Return summaries of all complete parity pieces on this node."""
        return self.parts.held() if self.parts is not None else []

    def open(self, owner: int, save_id: str) -> tuple[Manifest, Plan, int, int]:
        """Return a snapshot's manifest and plan, its offset in shared memory, and a read-only file descriptor of this
        memory. The snapshot belongs to a rank of this node, or is a replica."""
        try:
            manifest, offset, fd = self.own.open(owner, save_id)
        except NotFoundError:
            if self.disk.has(owner, save_id):
                return self._restore_cache.fetch(*self.disk.place(owner, save_id))[:4]
            manifest, offset, fd = self.replicas.open(owner, save_id)
        return manifest, self.plans[str(manifest["plan"])], offset, fd

    # --- other nodes ----------------------------------------------------------------------------

    def listen(self, host: str) -> int:
        """Start to serve other nodes on a free port of `host`. Returns the port, or 0 in a job with one node."""
        if self._alone:
            return 0
        if self.peer_server is None:
            self.peer_server = PeerServer(
                self.own,
                self.replicas,
                self.plans,
                secret=self._secret,
                job=self._job,
                cpu_priority=self._cpu_priority,
                parts=self.parts,
                host=host,
                encrypted=self._encrypted,
                nixl=self._nixl,
                disk=self.disk,
            )
            if self.event_log is not None:
                self.peer_server.on_events = self.event_log.receive
            self.peer_server.start()
        return self.peer_server.port

    def set_peers(
        self,
        peers: dict[int, tuple[str, int]],
        domains: dict[int, str],
        servers_lost: int = 0,
        group: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Set the addresses of all nodes' memory servers. A new address means that the node has a new memory server.

        Args:
            peers: address of each node's memory server.
            domains: name of each node's failure domain.
            servers_lost: number of memory servers that the job has lost so far, including those of nodes not in
                `peers`.
            group: ranks of each node in this node's parity group, or None without parity.
        """
        others = {node: address for node, address in self._peers.items() if node != self._node}
        if servers_lost != self._servers_lost or any(peers.get(node, at) != at for node, at in others.items()):
            for uploader in self.uploaders:
                uploader.forsake()
        self._peers, self._servers_lost = dict(peers), servers_lost
        if self.replicator is not None:
            self.replicator.set_peers(peers, domains, group)

    def replicate_now(self) -> None:
        """Begin to copy the newest snapshots to other nodes. `wait_idle` waits until the copies are done."""
        if self.replicator is None:
            return
        for owner in self.own.owners():
            manifest = self.own.newest(owner)
            if manifest is not None and manifest["extras"].get("sharing") != "same":
                self.replicator.catch_up(owner, manifest)

    def schedule_peer_copies(self, step: int | None) -> None:
        """See `Replicator.go_by`."""
        if self.replicator is not None:
            self.replicator.go_by(step)

    # --- durable tiers --------------------------------------------------------------------------

    def check_tiers(self) -> None:
        """Raise HyperpodExtError if a tier is not writable, for example if a bucket is missing or denies access."""
        for uploader in self.uploaders:
            if not uploader.tier.on_node:  # `NodeDisk.state` checks this node's own disks
                uploader.checkpoints.store.check()

    def schedule_copy(self, step: int, kind: str | None) -> None:
        """Copy the snapshots of `step` to the tiers of kind `kind` once the snapshots are saved. If `kind` is None, the
        snapshots are copied to every durable tier."""
        for uploader in self.uploaders:
            if kind in (None, uploader.tier.kind):
                uploader.ask(step)
        if kind == "peer" and self.replicator is not None:
            self.replicator.ask(step)

    def durable(self, exclude: Collection[tuple[str, str]] = ()) -> DurableCheckpoints:
        """See `RestoreCache.offers`."""
        return self._restore_cache.offers(exclude)

    def fetch_head(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, bool]:
        """See `RestoreCache.head`."""
        return self._restore_cache.head(url, folder, rank)

    def fetch(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, int, int, bool]:
        """See `RestoreCache.fetch`."""
        return self._restore_cache.fetch(url, folder, rank)

    # --- the end --------------------------------------------------------------------------------

    def upload_now(self, save_id: str, timeout_s: float) -> UploadProgress:
        """Upload the checkpoint `save_id` to every durable tier, even if it is not due. Returns the progress after at
        most `timeout_s`."""
        manifests = [
            self.own.open_manifest(int(summary["rank"]), save_id)
            for summary in self.own.held()
            if summary["save_id"] == save_id
        ]
        for uploader in self.uploaders:
            uploader.take_now(manifests)
        idle = self._wait_uploaded(time.monotonic() + timeout_s)
        tiers = [uploader.progress_of(manifests) for uploader in self.uploaders if manifests]
        return UploadProgress(idle=idle, tiers=tuple(tiers))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all due copies and all events are uploaded or have failed. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if self.event_log is not None and not self.event_log.wait_kept(timeout_s):
            return False
        uploaded = self._wait_uploaded(deadline)
        return (self.replicator is None or self.replicator.wait_idle(_left(deadline))) and uploaded

    def _wait_uploaded(self, deadline: float) -> bool:
        return all(uploader.wait_idle(_left(deadline)) for uploader in self.uploaders)

    def status(self) -> ServerStatus:
        """Return summaries of snapshots and parity pieces, and the state of the copies to each tier."""
        to_peers = [self.replicator.status()] if self.replicator is not None else []
        copying = [*to_peers, *(uploader.status for uploader in self.uploaders)]
        return ServerStatus(snapshots=tuple(self.held()), pieces=tuple(self.held_pieces()), copying=tuple(copying))


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def slots_of(policy: CheckpointPolicy) -> int:
    """Return the number of snapshot slots for each rank. Two slots are always needed: for a complete snapshot, and for
    the snapshot that is being written. A durable tier adds a slot for a snapshot that is being uploaded. A peer tier
    adds a slot for a snapshot that is being copied to peers, and a slot for the newest snapshot that has replicas."""
    return MIN_SLOTS + 2 * (policy.peer() is not None) + bool(policy.durable())
