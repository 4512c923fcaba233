"""Frozen parameters, such as LoRA's base model: each slot gets them once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of, is_memory
from hyperpod_ext.runtime.snapshot.image import Layout
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_WORDS = 1 << 22
"""Number of 8-byte words multiplied at a time."""
_SPREAD = 0x1E3779B97F4A7C15
_MOST_CHANGED = 3
"""After so many saves in a row with changes, comparing stops: something other than the optimizer trains them."""


class FrozenPrefix:
    """The first items of a layout, in each slot: compared by digest at each save, and copied only after a change.

    Args:
        items: number of items, from the layout's first; all are of frozen parameters.
    """

    def __init__(self, layout: Layout, items: int) -> None:
        self._layout, self.items = layout, items
        self._nbytes = layout.plan.items[items - 1].end if items else 0
        """Length of the prefix in the image."""
        self._held: dict[int, tuple[list[int], int]] = {}
        """Digests of the tensors in each slot, and the CRC64-NVME of the prefix of its image."""
        self._newest: list[int] | None = None
        """Digests at the last save."""
        self._changed = 0
        """Number of last saves in a row with changed tensors."""

    def store(self, slot: int, image: memoryview, views: Sequence[torch.Tensor], stager: Stager) -> tuple[int, int]:
        """Store the present tensors in a slot; return the length of the image's prefix, and its CRC64-NVME.

        Args:
            image, views: the slot's bytes, with frames, and its tensors.
        """
        held = self._held.pop(slot, None)
        if not self.items:
            return 0, 0
        sources, copies = self._layout.locals[: self.items], views[: self.items]
        compare = self._changed < _MOST_CHANGED
        if compare:
            stager.wait_device()
            with stager.after_device():
                now = self._digests(sources)
            self._changed = self._changed + 1 if self._newest not in (None, now) else 0
            self._newest = now
        if held is None or not compare or held[0] != self._newest:
            stager.copy(sources, copies)
            held = self._digests(copies) if compare else [], crc64nvme(image[: self._nbytes])
        self._held[slot] = held
        return self._nbytes, held[1]

    def forget(self) -> None:
        """Copy into each slot again: after a fault, a slot may be damaged."""
        self._held.clear()

    def _digests(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return a digest of each tensor: its CRC, or on another device a sum computed there."""
        by_crc = map(is_memory, self._layout.locals)
        return [
            crc64nvme(bytes_of(tensor)) if crc else weighted_sum(tensor)
            for tensor, crc in zip(tensors, by_crc, strict=False)
        ]


def weighted_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's 8-byte words, each times an odd number, modulo 2**64; equal on all devices.

    A change of one word always changes the sum, and any other change with a probability of about 1 - 2**-64.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8 or raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    words, total = raw.view(torch.int64), torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        numbers = torch.arange(start, start + part.numel(), device=raw.device)
        spread = numbers * _SPREAD
        total += (part * ((spread ^ (spread >> 32)) | 1)).sum()
    return int(total)
