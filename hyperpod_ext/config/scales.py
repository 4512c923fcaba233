"""Computes how a global batch is divided on each number of nodes, for the command line and for rules. Pure
arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hyperpod_ext.config.elastic import Batch, BatchPolicy, Elastic, batch_at


@dataclass(frozen=True, slots=True)
class Scale:
    """Division of a step's global batch on one number of nodes."""

    nodes: int
    ranks: int
    """Number of data-parallel copies of the model, which read different samples."""
    global_batch_size: int
    micro_batch_size: int
    micro_batches: int
    """Number of micro-batches in one step, over all ranks."""
    micro_batches_per_rank: int
    """Largest number of micro-batches on one rank. Ranks with fewer micro-batches wait for this rank, or compute
    micro-batches whose results are ignored."""
    ghosts: int
    """Number of micro-batches of a step whose results are ignored, or for whose duration a rank waits."""
    efficiency: float
    """Share of the ranks' time that is spent on real samples, from 0 to 1."""
    learning_rate_factor: float


def plan_scales(
    global_batch_size: int,
    micro_batch_size: int,
    nodes: Iterable[int],
    *,
    workers_per_node: int = 1,
    ranks_per_copy: int = 1,
    policy: BatchPolicy | None = None,
) -> tuple[Scale, ...]:
    """Return the division of a step's batch on each number of nodes. Numbers of nodes whose ranks do not form whole
    copies of the model are skipped.

    Raises:
        ValueError: the global batch is not a multiple of the micro-batch size on one of the numbers of nodes.
    """
    policy = policy or BatchPolicy()
    counted = ((one, one * workers_per_node // ranks_per_copy) for one in nodes)
    return tuple(
        _scale(one, ranks, batch_at(policy, one, global_batch_size, micro_batch_size))
        for one, ranks in counted
        if ranks and one * workers_per_node % ranks_per_copy == 0
    )


def discrete_values(scales: Sequence[Scale], at_least: float) -> tuple[int, ...]:
    """Return the numbers of nodes whose efficiency is at least `at_least`, for `replicaDiscreteValues` and
    `elastic.sizes`."""
    return tuple(scale.nodes for scale in scales if scale.efficiency >= at_least)


def sizes_of(elastic: Elastic) -> tuple[int, ...]:
    """Return every number of nodes that an elastic job may run on."""
    return elastic.sizes or tuple(range(elastic.min_nodes, elastic.max_nodes + 1, elastic.step or 1))


def _scale(nodes: int, ranks: int, batch: Batch) -> Scale:
    slots = batch.global_batch_size // batch.micro_batch_size
    most = -(-slots // ranks)
    return Scale(
        nodes=nodes,
        ranks=ranks,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        micro_batches=slots,
        micro_batches_per_rank=most,
        ghosts=most * ranks - slots,
        efficiency=slots / (most * ranks),
        learning_rate_factor=batch.learning_rate_factor,
    )
