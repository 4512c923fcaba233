"""A dataset of another library read through a resize, in that library's own interpreter."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.runtime.data import ElasticDataLoader


def rows_of(dataset: Any) -> list[Any]:
    """The rows of one epoch that count, in the order in which they are read: five steps by 2 ranks, the rest by 3."""
    rows: list[Any] = []
    state: dict[str, Any] | None = None
    for world in (2, 3):
        loaders = [
            ElasticDataLoader(
                dataset, global_batch_size=8, micro_batch_size=2, rank=rank, world_size=world, collate=list
            )
            for rank in range(world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for number, steps in enumerate(zip(*[loader.steps(1) for loader in loaders], strict=True)):
            for loader, step in zip(loaders, steps, strict=True):
                rows += [row for batch, weight in step if weight for row in batch]
                loader.ack(step)
            if world == 2 and number == 4:
                break
        state = loaders[-1].state_dict()
    return rows
