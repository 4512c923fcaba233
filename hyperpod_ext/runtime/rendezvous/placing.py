"""Which node gets which ranks when a job goes on with other nodes. Pure.

A node has a block of as many ranks in a row as it has workers, and keeps its workers' order, so that each stays with
its device. Shards of FSDP lie in the order of ranks: of a world of N nodes, block b holds the share from b/N to (b+1)/N
of everything. Where the state is cut so, a node is best given the block that holds most of what it has already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hyperpod_ext.config.elastic import Elastic


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers of nodes that a job may have, smallest first, and ranks of each node."""

    sizes: tuple[int, ...]
    workers_per_node: int

    @classmethod
    def of(cls, elastic: Elastic | None, nodes: int, workers_per_node: int, batch: int | None = None) -> Scale | None:
        """Those of a job that begins with `nodes`; numbers that do not divide its global batch are left out."""
        if elastic is None:
            return None
        sizes = set(elastic.sizes or range(elastic.min_nodes, elastic.max_nodes + 1, elastic.step or 1)) | {nodes}
        fits = sorted(size for size in sizes if batch is None or batch % (size * workers_per_node) == 0)
        return cls(tuple(fits), workers_per_node)

    def most(self, nodes: int) -> int | None:
        """The largest of the numbers that is not above `nodes`."""
        return max((size for size in self.sizes if size <= nodes), default=None)


def blocks_of(nodes: Mapping[int, int], workers_per_node: int) -> list[int]:
    """Node of each block of ranks, from the node of each rank."""
    return [nodes[block * workers_per_node] for block in range(len(nodes) // workers_per_node)]


def ranks_of(blocks: Sequence[int], workers_per_node: int) -> dict[int, int]:
    """Node of each rank, from the node of each block."""
    return {rank: blocks[rank // workers_per_node] for rank in range(len(blocks) * workers_per_node)}


def overlap(before: int, of_before: int, after: int, of_after: int) -> int:
    """What blocks `before` of a world and `after` of another have in common, in parts of 1/(of_before x of_after)."""
    low = max(before * of_after, after * of_before)
    high = min((before + 1) * of_after, (after + 1) * of_before)
    return max(0, high - low)


def assign_ranks(before: Sequence[int], nodes: Collection[int], *, sharded: bool) -> list[int]:
    """Node of each block of the new world.

    Args:
        before: node of each block of the old world.
        nodes: those of the new world, some of them new.
        sharded: whether each node holds a part of its own, so that most of it should stay where it is. Else every
            node has what any needs, and whoever can keeps its ranks.
    """
    staying = [(block, node) for block, node in enumerate(before) if node in nodes]
    count = len(nodes)
    places = _most_in_common(staying, len(before), count) if sharded else _as_they_were(staying, count)
    blocks = dict(places)
    newcomers = iter(sorted(set(nodes) - {node for _, node in staying}))
    return [blocks[block] if block in blocks else next(newcomers) for block in range(count)]


def _as_they_were(staying: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    kept = [(block, node) for block, node in staying if block < count]
    free = sorted(set(range(count)) - {block for block, _ in kept})
    return kept + [(free[i], node) for i, (_, node) in enumerate(at for at in staying if at[0] >= count)]


def _most_in_common(staying: Sequence[tuple[int, int]], of_before: int, of_after: int) -> list[tuple[int, int]]:
    """The places that have most in common with those before, among equals those where most nodes keep theirs.

    Nodes keep their order: blocks lie in a row, so nothing is won by crossing.
    """
    best: list[tuple[tuple[int, int], list[tuple[int, int]]] | None] = [((0, 0), []), *([None] * of_after)]
    for number, (block, node) in enumerate(staying):
        # best[k]: the places of the nodes so far, all of them below block k
        following: list[tuple[tuple[int, int], list[tuple[int, int]]] | None] = [None] * (of_after + 1)
        for place in range(number, of_after - (len(staying) - number - 1)):
            known = best[place] if place < len(best) else None
            options = [following[place]] if following[place] is not None else []
            if known is not None:
                (common, same), places = known
                gain = overlap(block, of_before, place, of_after)
                options.append(((common + gain, same + (block == place)), [*places, (place, node)]))
            following[place + 1] = max((o for o in options if o is not None), key=lambda o: o[0], default=None)
        best = following
        for place in range(1, of_after + 1):  # whoever fits below a place fits below the next one, too
            before_it, here = best[place - 1], best[place]
            if before_it is not None and (here is None or before_it[0] > here[0]):
                best[place] = before_it
    found = best[of_after]
    return [] if found is None else found[1]


def moved_ranks(before: Mapping[int, int], after: Mapping[int, int], workers_per_node: int) -> dict[int, int]:
    """New rank of each rank whose process stays, by its rank before."""
    old, new = blocks_of(before, workers_per_node), blocks_of(after, workers_per_node)
    return {
        old.index(node) * workers_per_node + local: new.index(node) * workers_per_node + local
        for node in new
        if node in old
        for local in range(workers_per_node)
    }


def local_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Share of the new world's state that lies on the node which needs it, where each node holds its part alone."""
    common = sum(
        overlap(before.index(node), len(before), block, len(after))
        for block, node in enumerate(after)
        if node in before
    )
    return common / (len(before) * len(after)) if before and after else 0.0
