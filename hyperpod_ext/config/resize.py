"""Requests to resize a running job or to move ranks, as files in the job's run folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.scales import sizes_of

RESIZES = "resizes"
"""Folder of requests in the run folder. Each request is a file that is written atomically and never changed."""
WANTED = "nodes_wanted.json"
"""File in the run folder with the numbers of wanted nodes. The process that starts nodes reads it."""
LEFT = "node{}.left"
"""File in the run folder that records that the job has left this node, which can be returned to the scheduler."""


class MoveOrder(Config):
    """A request of `hp-ext move`."""

    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node whose ranks move to a spare."""


class ResizeOrder(Config):
    """A request of `hp-ext resize`."""

    nodes: Annotated[PositiveInt, Field(examples=[3])]
    """New number of nodes, without spares."""
    joining: tuple[NonNegativeInt, ...] = ()
    """Numbers of joining nodes. The job waits for all of them without a time limit, because a queue can be long."""


Order = ResizeOrder | MoveOrder


def allowed_sizes(elastic: Elastic, nodes: int, workers_per_node: int, batch: int | None) -> tuple[int, ...]:
    """Return the allowed numbers of nodes of a job that started with `nodes`, smallest first, without numbers that do
    not divide its global batch."""
    sizes = {*sizes_of(elastic), nodes}
    return tuple(sorted(size for size in sizes if batch is None or batch % (size * workers_per_node) == 0))


def has_already(nodes: int) -> str:
    """Return the message of a resize that changes nothing. Such a resize counts as success."""
    return f"the job has {nodes} nodes already"
