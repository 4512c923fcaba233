"""DDP wrappers of a run. The restore completes those that were made before it: the restored step has the bucket layout,
and DDP's constructor would send the values of a new rank 0 into the live state of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.state import ddp_buckets as buckets
from hyperpod_ext.runtime.state import gradients


class DataParallel:
    """The DDP wrappers of one generation, and their bucket layouts, which outlive it."""

    def __init__(self) -> None:
        self.layouts: dict[str, buckets.Buckets] = {}
        self._since: dict[str, int] = {}
        """Step after which each layout became known; if the step is repeated, so is the layout."""
        self._complete: list[tuple[str, DistributedDataParallel]] = []
        """Wrappers with the names of their layouts."""
        self._incomplete: list[buckets.IncompleteDDP] = []

    def add(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Return a wrapper, which `complete` makes usable."""
        self._incomplete.append(buckets.IncompleteDDP(module, options))
        return self._incomplete[-1]

    def complete(self, objects: Iterable[object], *, init_sync: bool) -> None:
        """Complete the wrappers, in the order of their creation. Collective.

        Args:
            objects: the registered objects, which number the parameters.
            init_sync: send rank 0's values first, unless a wrapper's options say otherwise.
        """
        waiting, self._incomplete = self._incomplete, []
        for wrapped in waiting:
            trained = gradients.trained_of(wrapped.module, objects)
            name = f"{trained}.{sum(known.startswith(f'{trained}.') for known, _ in self._complete)}"
            before = self.layouts.get(str(len(self._complete)))  # earlier versions counted all wrappers
            self._complete.append((name, wrapped))
            buckets.complete(wrapped, self.layouts.get(name, before), init_sync=init_sync)

    def restore(self, layouts: Mapping[str, buckets.Buckets]) -> None:
        """Use the layouts of the restored step."""
        self.layouts = dict(layouts)

    def record(self, step: int) -> None:
        """Record the layouts that became known in `step`. Collective."""
        for name, wrapped in self._complete:
            if name not in self.layouts and (layout := buckets.layout_of(wrapped)) is not None:
                self.layouts[name], self._since[name] = layout, step

    def go_back(self, step: int) -> None:
        """Forget the layouts that became known after `step`."""
        self.layouts = {name: each for name, each in self.layouts.items() if self._since.get(name, 0) <= step}

    def leave(self) -> None:
        """Release the wrappers at the end of a generation."""
        self._complete, self._incomplete = [], []
