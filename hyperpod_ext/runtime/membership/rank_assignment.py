"""Assigns ranks to nodes when a job continues on a different set of nodes. Pure functions.

Each node has one block of consecutive ranks, one rank per worker process. The workers of a node keep their order, so
that each worker keeps its device. FSDP stores shards in the order of ranks: with N nodes, block b has the share from
b/N to (b+1)/N of each tensor. If the state is sharded, a node's new block overlaps its current block as much as
possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.resize import allowed_sizes


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers of nodes with which a job may run, in ascending order, and the number of ranks per node."""

    sizes: tuple[int, ...]
    workers_per_node: int

    @classmethod
    def of(cls, elastic: Elastic | None, nodes: int, workers_per_node: int, batch: int | None = None) -> Scale:
        """Return the allowed numbers of nodes of a job that begins with `nodes` nodes. `batch`: global batch size of
        the job; None if it is unknown."""
        sizes = (nodes,) if elastic is None else allowed_sizes(elastic, nodes, workers_per_node, batch)
        return cls(sizes, workers_per_node)

    def most(self, nodes: int) -> int | None:
        """Return the largest allowed number of nodes up to `nodes`; None if every allowed number is larger."""
        return max((size for size in self.sizes if size <= nodes), default=None)


def blocks_of(nodes: Mapping[int, int], workers_per_node: int) -> list[int]:
    """Return the node of each block of consecutive ranks. `nodes`: node of each rank."""
    return [nodes[block * workers_per_node] for block in range(len(nodes) // workers_per_node)]


def ranks_of(blocks: Sequence[int], workers_per_node: int) -> dict[int, int]:
    """Return the node of each rank. `blocks`: node of each block of consecutive ranks."""
    return {rank: blocks[rank // workers_per_node] for rank in range(len(blocks) * workers_per_node)}


def overlap(before: int, of_before: int, after: int, of_after: int) -> int:
    """Return the overlap of block `before` of `of_before` equal blocks with block `after` of `of_after` equal blocks of
    the same state. The unit is 1/(of_before x of_after) of the state."""
    low = max(before * of_after, after * of_before)
    high = min((before + 1) * of_after, (after + 1) * of_before)
    return max(0, high - low)


def assign_ranks(before: Sequence[int], nodes: Collection[int], *, sharded: bool) -> list[int]:
    """Return the node of each block of consecutive ranks in the new rank assignment.

    Args:
        before: node of each block of ranks in the old rank assignment.
        nodes: nodes in the new rank assignment, including joining nodes.
        sharded: whether each rank has its own shard of the state. With a sharded state, as much state as possible stays
            on its node; otherwise, as many nodes as possible keep their ranks.
    """
    staying = [(block, node) for block, node in enumerate(before) if node in nodes]
    count = len(nodes)
    blocks = _most_in_common(staying, len(before), count) if sharded else _as_they_were(staying, count)
    joining = iter(sorted(set(nodes) - {node for _, node in staying}))
    return [blocks[block] if block in blocks else next(joining) for block in range(count)]


def choose_staying(before: Sequence[int], candidates: Collection[int], count: int, *, sharded: bool) -> list[int]:
    """Choose `count` nodes of `candidates` that stay in the job. If the state is sharded, chooses the nodes whose
    shards overlap most with the new shards. If the state is not sharded, chooses the nodes with the lowest ranks."""
    able = [(block, node) for block, node in enumerate(before) if node in candidates]
    if not sharded or len(able) <= count:
        return [node for _, node in able[:count]]
    chosen = set(_most_in_common(able, len(before), count).values())
    return [node for _, node in able if node in chosen]


def _as_they_were(staying: Sequence[tuple[int, int]], count: int) -> dict[int, int]:
    return _fill({block: node for block, node in staying if block < count}, staying, count)


def _fill(blocks: dict[int, int], staying: Sequence[tuple[int, int]], count: int) -> dict[int, int]:
    """Assign each staying node that has no block yet to a free block: its former block if possible."""
    left = [(block, node) for block, node in staying if node not in blocks.values()]
    for block, node in sorted(left, key=lambda at: at[0] in blocks or at[0] >= count):
        if not (free := [place for place in range(count) if place not in blocks]):
            break  # no block is free, so the remaining nodes leave
        blocks[block if block in free else free[0]] = node
    return blocks


def _most_in_common(staying: Sequence[tuple[int, int]], of_before: int, of_after: int) -> dict[int, int]:
    """Assign staying nodes to new blocks with the largest total overlap with their old blocks. Of several assignments
    with the same overlap, choose the assignment that leaves the most nodes on their block.

    Nodes whose old and new blocks overlap keep their order, because swapping two nodes never increases the overlap of
    contiguous blocks. Nodes without any overlap get the remaining blocks.
    """
    # best[i][k]: best (overlap, number of unchanged blocks) if the first i nodes use only the first k blocks, where
    # nodes and blocks may be skipped
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
    """Return the new rank of each process that stays, by old rank."""
    old, new = blocks_of(before, workers_per_node), blocks_of(after, workers_per_node)
    return {
        old.index(node) * workers_per_node + local: new.index(node) * workers_per_node + local
        for node in new
        if node in old
        for local in range(workers_per_node)
    }


def local_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share (0 to 1) of a sharded state that is already on the node that needs it in the new rank
    assignment."""
    common = sum(
        overlap(before.index(node), len(before), block, len(after))
        for block, node in enumerate(after)
        if node in before
    )
    return common / (len(before) * len(after)) if before and after else 0.0
