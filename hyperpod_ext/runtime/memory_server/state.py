"""All that one memory server holds and does: own snapshots, replicas, plans, and the way to other tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.errors import MemoryTierFullError, NotFoundError
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import Courtesy
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.replication.replicator import Replicator
from hyperpod_ext.runtime.memory_server.restore_cache import Fetcher
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.slots.slots import MIN_SLOTS
from hyperpod_ext.runtime.memory_server.uploader import Drain
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest


class NodeMemory:
    """One node's part of every tier.

    Args:
        policy: what goes where, and when.
        node, nodes, owners: this node's number, how many there are, and how many ranks each has.
        most_nodes: how many there may come to be. Default: as many as there are.
        group: see `Courtesy`.
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
    ) -> None:
        self.policy, self._job, self._secret = policy, job, secret
        memory = policy.memory()
        limit = memory.budget_mib << 20 if memory is not None and memory.budget_mib is not None else None
        self._budget = Budget(limit, usable_bytes)
        self._node, self._owners = node, owners
        slots = slots_of(policy)
        self.own = Regions(kind="own", job=job, secret=secret, budget=self._budget, slots=slots)
        self.replicas = Regions(kind="replica", job=job, secret=secret, budget=self._budget, slots=MIN_SLOTS)
        self.plans = Plans()
        self.drains = [
            Drain(
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
        self._courtesy = Courtesy(peer.max_slowdown if peer is not None else 1.0, group)
        if peer is not None and not self._alone:
            self.replicator = Replicator(
                self.own,
                self.plans.__getitem__,
                peer,
                node=node,
                secret=secret,
                courtesy=self._courtesy,
                when_busy=policy.when_busy,
            )
        self._peers: dict[int, tuple[str, int]] = {}
        self._provisional: dict[int, Manifest] = {}
        self._fetcher = Fetcher(self.drains, self._budget, self.plans)

    def map(self, owner: int, slot_bytes: int) -> tuple[Region, int]:
        """Region of a rank, and a descriptor of its memory. What was fetched to restore from gives way to it.

        Raises:
            MemoryTierFullError: the node has not that much left; what is held stays as it is.
        """
        try:
            return self.own.map(owner, slot_bytes)
        except MemoryTierFullError:
            if not self._fetcher.forget():
                raise
            return self.own.map(owner, slot_bytes)

    def seal(self, owner: int, slot: int, record: dict[str, Any]) -> Manifest:
        """Seal a snapshot, and send it on where it is due; a provisional one once its writer stands by it."""
        self.plans[str(record["plan"])]
        provisional = bool(record.pop("provisional", False))
        with self._courtesy.urgent():
            manifest = self.own.seal(owner, slot, record)
        if provisional:
            self._provisional[owner] = manifest
        else:
            self._send_on(owner, manifest)
        self._fetcher.forget()
        return manifest

    def settle(self, owner: int, save_id: str, *, keep: bool) -> None:
        """The writer of a provisional snapshot stands by it, or takes it back."""
        manifest = self._provisional.pop(owner, None)
        if manifest is None or manifest["save_id"] != save_id:
            return
        if keep:
            self._send_on(owner, manifest)
        else:
            self.own.take_back(owner, save_id)
            if self.replicator is not None:
                self.replicator.left_out(owner)

    def _send_on(self, owner: int, manifest: Manifest) -> None:
        """To the slower tiers that are due."""
        for drain in self.drains:
            drain.sealed(owner, manifest)
        # what data parallelism keeps equal, every node holds already: its own snapshot is the others' replica
        if self.replicator is not None and manifest["extras"].get("sharing") != "same":
            self.replicator.sealed(owner, manifest)
        elif self.replicator is not None:
            self.replicator.left_out(owner)

    def stepped(self, owner: int) -> None:
        """A rank has made a step."""
        if self.replicator is not None:
            self.replicator.stepped(owner)

    def begin(self, owner: int, slot: int, step: int, save_id: str, generation: int) -> None:
        """A rank writes a slot from now on."""
        self.stepped(owner)
        self.own.begin(owner, slot, step, save_id, generation)
        if self.replicator is not None:
            self.replicator.begun(owner, generation, step)

    def fence(self, generation: int, step: int | None, run: str, stored: Collection[str] = ()) -> None:
        """A generation begins at `step`; `stored`: URLs of durable tiers that it begins from.

        `step` None: where it begins is not certain yet. Older writers are refused, and nothing is given up.
        """
        self.own.fence(generation, step)
        self.replicas.fence(generation, step)
        if step is not None:
            for drain in self.drains:
                drain.enter(generation, step, run, stored)

    def enter_world(self, nodes: int) -> None:
        """The job goes on with so many nodes; what is on its way is of as many as when it was sealed."""
        for drain in self.drains:
            drain.resize(self._node, nodes, self._owners)

    def settle_world(self, ranks: Collection[int], world_size: int) -> None:
        """The world that was left is needed no more: give back the memory of ranks that are not here any longer."""
        for owner in set(self.own.owners()) - set(ranks):
            self.own.drop_unused(owner)
        for owner in self.replicas.owners():
            if owner >= world_size or owner in ranks:
                self.replicas.drop_unused(owner)

    def held(self) -> list[dict[str, Any]]:
        """Whole snapshots here, own and replicas, in brief."""
        own = [{**brief, "replica": False} for brief in self.own.held()]
        return own + [{**brief, "replica": True} for brief in self.replicas.held()]

    def open(self, owner: int, save_id: str) -> tuple[Manifest, Plan, int, int]:
        """Manifest, plan, offset and a read-only descriptor of a snapshot, own or replica."""
        try:
            manifest, offset, fd = self.own.open(owner, save_id)
        except NotFoundError:
            manifest, offset, fd = self.replicas.open(owner, save_id)
        return manifest, self.plans[str(manifest["plan"])], offset, fd

    # --- other nodes ----------------------------------------------------------------------------

    def listen(self, host: str) -> int:
        """Serve other nodes on a free port of `host`; 0 on a job of one node."""
        if self._alone:
            return 0
        if self.peer_server is None:
            self.peer_server = PeerServer(
                self.own,
                self.replicas,
                self.plans,
                secret=self._secret,
                job=self._job,
                courtesy=self._courtesy,
                host=host,
            )
            self.peer_server.start()
        return self.peer_server.port

    def set_peers(self, peers: dict[int, tuple[str, int]], domains: dict[int, str]) -> None:
        """Who the other nodes are, and what fails together. One with another address is another memory server."""
        if any(peers.get(node, address) != address for node, address in self._peers.items() if node != self._node):
            for drain in self.drains:
                drain.forsake()
        self._peers = dict(peers)
        if self.replicator is not None:
            self.replicator.set_peers(peers, domains)

    def replicate_now(self) -> None:
        """Have the newest snapshots copied to other nodes; `wait_idle` tells when they are."""
        if self.replicator is None:
            return
        for owner in self.own.owners():
            manifest = self.own.newest(owner)
            if manifest is not None and manifest["extras"].get("sharing") != "same":
                self.replicator.catch_up(owner, manifest)

    # --- durable tiers --------------------------------------------------------------------------

    def durable(self, besides: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """See `Fetcher.offers`."""
        return self._fetcher.offers(besides)

    def fetch(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, int, int, bool]:
        """See `Fetcher.fetch`."""
        return self._fetcher.fetch(url, folder, rank)

    # --- the end --------------------------------------------------------------------------------

    def drain_now(self, save_id: str, timeout_s: float) -> dict[str, Any]:
        """Bring one commit to every durable tier, whether it is due or not. `idle`: false when time ran out; `tiers`:
        how far it came in each, nothing where this node has no part in it."""
        manifests = [
            self.own.open_manifest(int(brief["rank"]), save_id)
            for brief in self.own.held()
            if brief["save_id"] == save_id
        ]
        for drain in self.drains:
            drain.take_now(manifests)
        idle = self._wait_drained(time.monotonic() + timeout_s)
        return {"idle": idle, "tiers": [drain.way_of(manifests) for drain in self.drains if manifests]}

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything that is due has arrived somewhere or failed."""
        deadline = time.monotonic() + timeout_s
        drained = self._wait_drained(deadline)
        return (self.replicator is None or self.replicator.wait_idle(_left(deadline))) and drained

    def _wait_drained(self, deadline: float) -> bool:
        return all(drain.wait_idle(_left(deadline)) for drain in self.drains)

    def status(self) -> dict[str, Any]:
        """What is held, and how the copying goes."""
        copying = [self.replicator.status()] if self.replicator is not None else []
        return {"snapshots": self.held(), "copying": copying + [drain.status for drain in self.drains]}


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def slots_of(policy: CheckpointPolicy) -> int:
    """Slots of each rank: one that is whole and one that is written; one more that is copied to a durable tier;
    with peers, one that is copied and one that has its replicas, so that a node's loss leaves one step whole."""
    return MIN_SLOTS + 2 * (policy.peer() is not None) + bool(policy.durable())
