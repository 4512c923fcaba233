"""Orders to resize a job that runs, or to move ranks in it: files in its run folder, all that both sides share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.scales import sizes_of

RESIZES = "resizes"
"""Folder of orders in the run folder; each is a file that is written whole and never changed."""
WANTED = "nodes_wanted.json"
"""In the run folder: the numbers of the nodes that the job would have, for whoever starts nodes."""
LEFT = "node{}.left"
"""In the run folder: nothing of this node is needed any more, and whoever lent it may have it back."""


class MoveOrder(Config):
    """What `hp-ext move` leaves there."""

    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node whose ranks go to a spare."""


class ResizeOrder(Config):
    """What `hp-ext resize` leaves there."""

    nodes: Annotated[PositiveInt, Field(examples=[3])]
    """Nodes that the job goes on with, spares not counted."""
    joining: tuple[NonNegativeInt, ...] = ()
    """Numbers of nodes that come for it; it waits for all of them, however long a queue may take."""


Order = ResizeOrder | MoveOrder


def allowed_sizes(elastic: Elastic, nodes: int, workers_per_node: int, batch: int | None) -> tuple[int, ...]:
    """Numbers of nodes that a job which began with `nodes` may have, smallest first; those that do not divide its
    global batch are left out."""
    sizes = {*sizes_of(elastic), nodes}
    return tuple(sorted(size for size in sizes if batch is None or batch % (size * workers_per_node) == 0))


def has_already(nodes: int) -> str:
    """Why a resize to the number of nodes that a job has changes nothing: by this word it is no failure."""
    return f"the job has {nodes} nodes already"
