"""DDP wrappers of a run.

A wrapper that is made before the restore stays incomplete until the restore. A complete wrapper would, in DDP's
constructor, overwrite the live state of other ranks with the values of a new rank 0. DDP's gradient buckets must also
get the layout that is stored with the restored step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.state import ddp_buckets as buckets
from hyperpod_ext.runtime.state import gradients


class DataParallel:
    """The DDP wrappers of one generation, and their bucket layouts, which are kept for later generations."""

    def __init__(self) -> None:
        self.layouts: dict[str, buckets.Buckets] = {}
        """Bucket layouts by name."""
        self._since: dict[str, int] = {}
        """Step in which DDP chose each layout, by the layout's name. DDP chooses again if the step is repeated."""
        self._complete: list[tuple[str, DistributedDataParallel]] = []
        """Complete DDP wrappers, each with the name of its layout."""
        self._incomplete: list[buckets.IncompleteDDP] = []

    def add(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Return a DDP wrapper of `module` that can be called only after `complete`."""
        self._incomplete.append(buckets.IncompleteDDP(module, options))
        return self._incomplete[-1]

    def complete(self, objects: Iterable[object], *, init_sync: bool) -> None:
        """Complete the incomplete wrappers, in the order of their creation. Collective.

        Args:
            objects: the registered objects, in the order in which their parameters are numbered.
            init_sync: whether DDP first sends rank 0's parameter values to all ranks; a wrapper's own option has
                precedence.
        """
        waiting, self._incomplete = self._incomplete, []
        for wrapped in waiting:
            trained = gradients.trained_of(wrapped.module, objects)
            name = f"{trained}.{sum(known.startswith(f'{trained}.') for known, _ in self._complete)}"
            before = self.layouts.get(str(len(self._complete)))  # names in earlier versions are indices
            self._complete.append((name, wrapped))
            buckets.complete(wrapped, self.layouts.get(name, before), init_sync=init_sync)

    def restore(self, layouts: Mapping[str, buckets.Buckets]) -> None:
        """Use the bucket layouts that were stored with the restored step."""
        self.layouts = dict(layouts)

    def record(self, step: int) -> None:
        """Store the bucket layouts that DDP has chosen during step number `step`. Collective."""
        for name, wrapped in self._complete:
            if name not in self.layouts and (layout := buckets.layout_of(wrapped)) is not None:
                self.layouts[name], self._since[name] = layout, step

    def go_back(self, step: int) -> None:
        """Forget the bucket layouts that DDP chose in steps after `step`."""
        self.layouts = {name: each for name, each in self.layouts.items() if self._since.get(name, 0) <= step}

    def leave(self) -> None:
        """Drop the references to the wrappers at the end of a generation."""
        self._complete, self._incomplete = [], []
