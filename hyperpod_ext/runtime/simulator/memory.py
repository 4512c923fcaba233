"""The snapshots in the memory of each simulated node, in the form of offers to a real coordinator."""

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
"""Number of nodes in one placement block, in jobs with at least twice as many nodes. The place of a copy depends on few
nodes, and placing 16,384 nodes would be too slow for each of a thousand faults."""


class Memory:
    """Snapshots and copies of all ranks. A node holds only snapshots that were saved since it joined."""

    def __init__(self, settings: Simulated, block: int = BLOCK) -> None:
        self._settings = settings
        self._block = block
        self._log: dict[str, list[SimulatedSnapshot]] = {name: [] for name in settings.tiers}
        self._born: dict[int, float] = {}
        self._paired: dict[tuple[int, int], tuple[float, SimulatedSnapshot | None]] = {}
        self._nodes: dict[int, int] = {}
        """Node of each rank."""
        self._placed: dict[int, Placement] = {}
        self._groups: dict[int, tuple[Group, ...]] = {}
        """Parity groups of each block."""
        self._stripes: dict[int, list[tuple[float, Group]]] = {}
        """Parity groups of each rank, newest first. Each has the time from which on its ranks protect each other."""
        self._left: dict[int, tuple[int, ...]] = {}
        """For each rank on a new node, the nodes that hold copies of its former node's snapshots."""
        self.sharing = "same" if settings.redundant else "shard"

    def place(self, nodes: dict[int, int], moment: float) -> None:
        """Place all ranks on nodes whose memory is empty."""
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
        """Move the ranks in `before` away from their nodes there. Snapshots that lost their copies are copied again at
        once."""
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
        """Return the owner's newest snapshot, which is copied at once after a node with its copy is lost."""
        newest = max(self._log.get("memory", ()), key=lambda held: held.captured_at, default=None)
        if newest is None:
            return None
        latency = self._settings.tiers["peer"].latency
        return SimulatedSnapshot(newest.step, newest.generation, newest.captured_at, moment + latency)

    def train(self, interval: FaultFreeInterval, until: float) -> None:
        """Record the snapshots of an interval that ends at `until`."""
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
        """Return the nodes that lack some snapshots of other nodes."""
        return set(self._born)

    def holders(self, node: int, rank: int) -> tuple[int, ...]:
        """Return the nodes that hold copies of the snapshots of `node`, on which `rank` runs, or keep parity with
        it."""
        if rank in self._stripes:
            others = dict.fromkeys(other for _, stripe in self._stripes[rank] for other in stripe if other != rank)
            return tuple(self._nodes[other] for other in others)
        if not self._placed:
            return ()
        left = self._left.get(rank, ()) if node in self._born else ()
        return tuple(dict.fromkeys((*self._placed[self._block_of(rank)].get(node, ()), *left)))

    def own(self, node: int, rank: int) -> list[Offer]:
        """Return the snapshots of the node's own rank: the newest ones, copied ones, and those on disk."""
        logs = (*self._log.get("memory", ()), *self._log.get("peer", ()))
        born = self._born.get(node, -1.0)
        offers = [self._offer(held, node, rank) for held in dict.fromkeys(logs) if held.captured_at > born]
        on_disk = (self._offer(held, node, rank) for held in self._log.get("disk", ()) if held.captured_at > born)
        return offers + [replace(one, tier="durable", name="disk", url="simulated") for one in on_disk]

    def copies(self, owner: int, holder: int, rank: int, moment: float) -> list[Offer]:
        """Return the copies in the memory of `holder` of the snapshots of `rank`, whose node was `owner`."""
        if not self._placed:
            return []
        log, born = self._log.get("peer", ()), self._born.get(owner, -1.0)
        held: list[SimulatedSnapshot] = []
        if owner in self._born and holder in self._left.get(rank, ()):  # copies of the former node's snapshots
            held += [one for one in log if self._born.get(holder, -1.0) < one.captured_at <= born]
        if holder in self._placed[self._block_of(rank)].get(owner, ()):
            since, again = self._paired.get((owner, holder), (-1.0, None))
            held += [one for one in log if one.captured_at > max(since, born)]
            if again is not None and again.ready_at <= moment:
                held.append(again)
        return [self._offer(one, holder, rank) for one in held]

    def pieces(self, node: int, rank: int, ranks: Collection[int]) -> list[Offer]:
        """Return the parity on the node of `rank`, for stripes whose ranks are all in `ranks`. The group that exists at
        a step makes the step's parity, which stays on the other nodes when a node of the group is replaced."""
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
        """Group the nodes of a block for the parity of later snapshots. Former groups are kept as far as possible."""
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
        """Return the block of a rank. Remaining ranks join the last block, because alone they may be too few for
        copies."""
        return min(rank // self._block, max(0, self._settings.nodes // self._block - 1))

    def _ranks(self, block: int) -> range:
        last = block == self._block_of(self._settings.nodes - 1)
        return range(block * self._block, self._settings.nodes if last else (block + 1) * self._block)

    def _domains(self, block: int) -> dict[int, str]:
        """Return the failure domains of the nodes on which a block's ranks now run."""
        return {node: self._domain(node) for node in (self._nodes[rank] for rank in self._ranks(block))}

    def _domain(self, node: int) -> str:
        return str(node // self._settings.rack_nodes) if self._settings.domains else ""
