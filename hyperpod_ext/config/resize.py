"""Models of the request files in a job's run folder that resize the running job or move its ranks to a spare."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.scales import sizes_of
from hyperpod_ext.counts import count

RESIZES = "resizes"
"""Folder of request files, relative to the run folder. A request file is written atomically and never changed."""
WANTED = "nodes_wanted.json"
"""File in the run folder with the numbers of all nodes that the job needs. The process that starts nodes reads the
file."""
LEFT = "node{}.left"
"""File in the run folder for a node that has left the job; `{}` stands for the node's number. The file allows the
launcher to return the node to the scheduler."""


class MoveOrder(Config):
    """A request of `hp-ext move`: move the ranks of a node to a spare."""

    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node whose ranks move to a spare node."""


class ResizeOrder(Config):
    """A request of `hp-ext resize`: change the number of nodes of a running job."""

    nodes: Annotated[PositiveInt, Field(examples=[3])]
    """New number of nodes, without spares."""
    joining: tuple[NonNegativeInt, ...] = ()
    """Numbers of the nodes that join the job. The job waits for all joining nodes without a time limit, because they
    may be in a long queue of the scheduler."""


Order = ResizeOrder | MoveOrder


def allowed_sizes(elastic: Elastic, nodes: int, workers_per_node: int, batch: int | None) -> tuple[int, ...]:
    """Return the numbers of nodes that an elastic job may run on, smallest first.

    Args:
        nodes: number of nodes with which the job started; always allowed by `elastic`.
        batch: global batch size. Numbers of nodes whose ranks do not divide the batch evenly are left out. None: the
            batch is not checked.
    """
    sizes = {*sizes_of(elastic), nodes}
    return tuple(sorted(size for size in sizes if batch is None or batch % (size * workers_per_node) == 0))


def has_already(nodes: int) -> str:
    """Return the message for a request to resize a job to its present number of nodes, which counts as successful."""
    return f"the job has {count(nodes, 'node')} already"
