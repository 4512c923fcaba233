"""Which node gets which ranks when a job goes on with other nodes. Pure.

A node has a block of as many ranks in a row as it has workers, and keeps its workers' order, so that each stays with
its device. Shards of FSDP lie in the order of ranks: of a world of N nodes, block b holds the share from b/N to (b+1)/N
of everything. Where the state is cut so, a node is best given the block that holds most of what it has already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.resize import allowed_sizes


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers of nodes that a job may have, smallest first, and ranks of each node."""

    sizes: tuple[int, ...]
    workers_per_node: int

    @classmethod
    def of(cls, elastic: Elastic | None, nodes: int, workers_per_node: int, batch: int | None = None) -> Scale:
        """Those of a job that begins with `nodes`."""
        sizes = (nodes,) if elastic is None else allowed_sizes(elastic, nodes, workers_per_node, batch)
        return cls(sizes, workers_per_node)

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
    blocks = _most_in_common(staying, len(before), count) if sharded else _as_they_were(staying, count)
    joining = iter(sorted(set(nodes) - {node for _, node in staying}))
    return [blocks[block] if block in blocks else next(joining) for block in range(count)]


def choose_staying(before: Sequence[int], candidates: Collection[int], count: int, *, sharded: bool) -> list[int]:
    """Which `count` of `candidates` stay when there are more: those of the lowest ranks, or, where the state is cut
    among nodes, those whose parts have most in common with the new ones."""
    able = [(block, node) for block, node in enumerate(before) if node in candidates]
    if not sharded or len(able) <= count:
        return [node for _, node in able[:count]]
    chosen = set(_most_in_common(able, len(before), count).values())
    return [node for _, node in able if node in chosen]


def _as_they_were(staying: Sequence[tuple[int, int]], count: int) -> dict[int, int]:
    return _fill({block: node for block, node in staying if block < count}, staying, count)


def _fill(blocks: dict[int, int], staying: Sequence[tuple[int, int]], count: int) -> dict[int, int]:
    """`blocks`, and the nodes that are in none of them in what is left, in their own where they can."""
    left = [(block, node) for block, node in staying if node not in blocks.values()]
    for block, node in sorted(left, key=lambda at: at[0] in blocks or at[0] >= count):
        if not (free := [place for place in range(count) if place not in blocks]):
            break  # more nodes than blocks: some of them leave
        blocks[block if block in free else free[0]] = node
    return blocks


def _most_in_common(staying: Sequence[tuple[int, int]], of_before: int, of_after: int) -> dict[int, int]:
    """The blocks that have most in common with those before; among equals, those of which most are the same.

    Nodes that keep data keep their order; blocks are contiguous, so swapping never increases the overlap. Nodes that
    keep nothing get the remaining blocks.
    """
    # best[i][k]: score of the first i nodes in the first k blocks, where any may be left out
    best = [[(0, 0)] * (of_after + 1) for _ in range(len(staying) + 1)]
    for i, (block, _) in enumerate(staying, 1):
        for k in range(1, of_after + 1):
            common, same = best[i - 1][k - 1]
            gain = overlap(block, of_before, k - 1, of_after)
            both = (common + gain, same + (block == k - 1)) if gain else (0, 0)
            best[i][k] = max(best[i - 1][k], best[i][k - 1], both)
    blocks, i, k = dict[int, int](), len(staying), of_after
    while i and k:
        if best[i][k] == best[i - 1][k]:
            i -= 1
        elif best[i][k] == best[i][k - 1]:
            k -= 1
        else:
            i, k = i - 1, k - 1
            blocks[k] = staying[i][1]
    return _fill(blocks, staying, of_after)


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
