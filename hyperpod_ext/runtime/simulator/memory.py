"""The snapshots in the memory of each simulated node, as the offers that a real coordinator gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hyperpod_ext.runtime.membership.parity_groups import Group, place_groups
from hyperpod_ext.runtime.membership.placement import Placement, place_replicas
from hyperpod_ext.runtime.simulator.interval import FaultFreeInterval, SimulatedSnapshot
from hyperpod_ext.runtime.simulator.settings import Simulated
from hyperpod_ext.runtime.snapshot.select import Offer

_SLOTS = 2
BLOCK = 256
"""Number of nodes in one block, if a job has at least twice as many. Copies are placed within a block: placing 16,384
nodes at once would be too slow for each of a thousand faults."""


class Memory:
    """Snapshots of all ranks, and their copies. A node has only snapshots that were taken after the node joined."""

    def __init__(self, settings: Simulated, block: int = BLOCK) -> None:
        self._settings = settings
        self._block = block
        self._log: dict[str, list[SimulatedSnapshot]] = {name: [] for name in settings.tiers}
        self._born: dict[int, float] = {}
        self._paired: dict[tuple[int, int], tuple[float, SimulatedSnapshot | None]] = {}
        self._nodes: dict[int, int] = {}
        """Node of each rank, by rank."""
        self._placed: dict[int, Placement] = {}
        self._groups: dict[int, tuple[Group, ...]] = {}
        """Parity groups of each block, by block."""
        self._stripes: dict[int, list[tuple[float, Group]]] = {}
        """Parity groups of each rank, newest first: time from which on a group protects snapshots, and its ranks."""
        self._left: dict[int, tuple[int, ...]] = {}
        """For each rank that has moved to a new node, the nodes that hold copies of its earlier snapshots."""
        self.sharing = "same" if settings.redundant else "shard"

    def place(self, nodes: dict[int, int], moment: float) -> None:
        """Place all ranks on nodes whose memory is empty, and choose the nodes that hold their copies."""
        for name in self._log.keys() - {"durable"}:
            self._log[name] = []
        self._born, self._paired, self._placed, self._left = {}, {}, {}, {}
        self._nodes, self._groups, self._stripes = dict(nodes), {}, {}
        if "peer" not in self._log:
            return
        for block in {self._block_of(rank) for rank in nodes}:
            if self._settings.parity is None:
                self._placed[block] = place_replicas(self._domains(block), self._settings.replicas)
            else:
                self._group(block, moment)

    def moved(self, nodes: dict[int, int], before: Mapping[int, int], moment: float) -> None:
        """Move ranks to the nodes in `nodes`. `before`: the node that each moved rank has left.

        Snapshots that have lost a copy are copied again at once."""
        ranks = list(before)
        for rank in ranks:
            self._left[rank] = self.holders(before[rank], rank)
            self._born[nodes[rank]] = moment
        self._nodes |= {rank: nodes[rank] for rank in ranks}
        for block in {self._block_of(rank) for rank in ranks} & self._groups.keys():
            self._group(block, moment)
        for block in {self._block_of(rank) for rank in ranks} & self._placed.keys():
            known = self._placed[block]
            after = place_replicas(self._domains(block), self._settings.replicas, known)
            newest = self._again(moment)
            for owner, holders in after.items():
                for holder in holders:
                    if holder not in known.get(owner, ()) or moment in (self._born.get(holder), self._born.get(owner)):
                        self._paired[owner, holder] = (moment, newest if owner not in self._born else None)
            self._placed[block] = after

    def _again(self, moment: float) -> SimulatedSnapshot | None:
        """Return the newest snapshot as a copy that starts at time `moment`, because an earlier copy was lost."""
        newest = max(self._log.get("memory", ()), key=lambda held: held.captured_at, default=None)
        if newest is None:
            return None
        latency = self._settings.tiers["peer"].latency
        return SimulatedSnapshot(newest.step, newest.generation, newest.captured_at, moment + latency)

    def train(self, interval: FaultFreeInterval, until: float) -> None:
        """Record the snapshots that were taken in an interval of training which ends at time `until`."""
        for name, log in self._log.items():
            keep = self._settings.keep if name == "durable" else _SLOTS
            found = interval.held(name, until, keep)
            self._log[name] = (found + log)[:keep]
        near = [log for name, log in self._log.items() if name != "durable"]
        oldest = min((held.captured_at for log in near for held in log), default=until)
        self._born = {node: born for node, born in self._born.items() if born > oldest}
        self._paired = {pair: its for pair, its in self._paired.items() if its[0] > oldest}

    def give_up(self, step: int) -> None:
        """Drop snapshots that are newer than `step`, because training continues after `step`."""
        for name, log in self._log.items():
            self._log[name] = [held for held in log if held.step <= step]

    def joining(self) -> set[int]:
        """Return the nodes that joined recently, and therefore lack some snapshots."""
        return set(self._born)

    def holders(self, node: int, rank: int) -> tuple[int, ...]:
        """Return the nodes that hold copies of the snapshots of `rank`, which runs on `node`, or parity that protects
        these snapshots."""
        if rank in self._stripes:
            others = dict.fromkeys(other for _, stripe in self._stripes[rank] for other in stripe if other != rank)
            return tuple(self._nodes[other] for other in others)
        if not self._placed:
            return ()
        left = self._left.get(rank, ()) if node in self._born else ()
        return tuple(dict.fromkeys((*self._placed[self._block_of(rank)].get(node, ()), *left)))

    def own(self, node: int, rank: int) -> list[Offer]:
        """Return the snapshots of a node's own rank, in the node's memory and on the node's disk."""
        logs = (*self._log.get("memory", ()), *self._log.get("peer", ()))
        born = self._born.get(node, -1.0)
        offers = [self._offer(held, node, rank) for held in dict.fromkeys(logs) if held.captured_at > born]
        on_disk = (self._offer(held, node, rank) for held in self._log.get("disk", ()) if held.captured_at > born)
        return offers + [replace(one, tier="durable", name="disk", url="simulated") for one in on_disk]

    def copies(self, owner: int, holder: int, rank: int, moment: float) -> list[Offer]:
        """Return the copies of the snapshots of `rank` in the memory of the node `holder`. `owner`: node on which
        `rank` was."""
        if not self._placed:
            return []
        log, born = self._log.get("peer", ()), self._born.get(owner, -1.0)
        held: list[SimulatedSnapshot] = []
        # also include copies that the rank's former node has sent
        if owner in self._born and holder in self._left.get(rank, ()):
            held += [one for one in log if self._born.get(holder, -1.0) < one.captured_at <= born]
        if holder in self._placed[self._block_of(rank)].get(owner, ()):
            since, again = self._paired.get((owner, holder), (-1.0, None))
            held += [one for one in log if one.captured_at > max(since, born)]
            if again is not None and again.ready_at <= moment:
                held.append(again)
        return [self._offer(one, holder, rank) for one in held]

    def pieces(self, node: int, rank: int, ranks: Collection[int]) -> list[Offer]:
        """Return the parity pieces (XOR of other ranks' snapshots) in the memory of `node`, on which `rank` runs.

        Only pieces of groups whose ranks are all in `ranks` are returned. The parity of a step belongs to the group
        that existed at the step. The parity stays on the group's other nodes when a node of the group is replaced."""
        born, found = self._born.get(node, -1.0), list[Offer]()
        for held in self._log.get("peer", ()) if rank in self._stripes else ():
            stripe = next((its for since, its in self._stripes[rank] if since < held.captured_at), ())
            if held.captured_at > born and stripe and set(stripe) <= set(ranks):
                found.append(Offer("parity", held.step, rank, node, held.save_id, sharing="shard", stripe=stripe))
        return found

    def stored(self) -> list[Offer]:
        """Return the checkpoints in the durable tier."""
        return [
            Offer("durable", held.step, -1, -1, held.save_id, url="s3://simulated", folder=held.save_id, name="s3")
            for held in self._log.get("durable", ())
        ]

    def _offer(self, held: SimulatedSnapshot, node: int, rank: int) -> Offer:
        digest = "" if self._settings.redundant else str(rank)
        return Offer("memory", held.step, rank, node, held.save_id, own_digest=digest, sharing=self.sharing)

    def _group(self, block: int, moment: float) -> None:
        """Group the nodes of a block for the parity of later snapshots. Existing groups are kept as far as possible."""
        assert self._settings.parity is not None
        self._groups[block] = place_groups(self._domains(block), self._settings.parity, self._groups.get(block, ()))
        ranks = {self._nodes[rank]: rank for rank in self._ranks(block)}
        for group in self._groups[block]:
            stripe = tuple(sorted(ranks[node] for node in group))
            for rank in stripe:
                known = self._stripes.setdefault(rank, [])
                if not known or known[0][1] != stripe:
                    known[:] = [(moment, stripe), *known[: _SLOTS - 1]]

    def _block_of(self, rank: int) -> int:
        """Return the block of a rank. The last block also has the remaining ranks, which might be too few to hold
        copies in a block of their own."""
        return min(rank // self._block, max(0, self._settings.nodes // self._block - 1))

    def _ranks(self, block: int) -> range:
        last = block == self._block_of(self._settings.nodes - 1)
        return range(block * self._block, self._settings.nodes if last else (block + 1) * self._block)

    def _domains(self, block: int) -> dict[int, str]:
        """Return the failure domain of each node on which one of the ranks in `block` runs."""
        return {node: self._domain(node) for node in (self._nodes[rank] for rank in self._ranks(block))}

    def _domain(self, node: int) -> str:
        return str(node // self._settings.rack_nodes) if self._settings.domains else ""
