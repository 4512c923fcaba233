"""Copy frozen parameters, such as the base model with LoRA, into each slot (memory for a snapshot) only once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of, is_memory
from hyperpod_ext.runtime.snapshot.image import Layout
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_WORDS = 1 << 22
"""Number of 8-byte words that `weighted_sum` multiplies at a time."""
_SPREAD = 0x1E3779B97F4A7C15
_MOST_CHANGED = 3
"""After this many saves in a row with changed frozen parameters, later saves copy the parameters without comparison."""


class FrozenPrefix:
    """Frozen parameters at the start of a snapshot. A save copies these parameters only if their digests have changed.

    Args:
        layout: layout of the snapshot.
        items: number of frozen parameters, which are the first items of the layout.
    """

    def __init__(self, layout: Layout, items: int) -> None:
        self._layout, self.items = layout, items
        self._nbytes = layout.plan.items[items - 1].end if items else 0
        """Number of bytes, at the start of a snapshot, that contain the frozen parameters."""
        self._held: dict[int, tuple[list[int], int]] = {}
        """Digests of the frozen parameters in each slot, and the CRC64-NVME of their bytes, by slot index."""
        self._newest: list[int] | None = None
        """Digests of the frozen parameters at the last save; None before the first save."""
        self._changed = 0
        """Number of saves in a row, up to the last one, at which frozen parameters had changed."""

    def store(self, slot: int, image: memoryview, views: Sequence[torch.Tensor], stager: Stager) -> tuple[int, int]:
        """Make a slot contain the present frozen parameters; return the number of their bytes, and their CRC64-NVME.

        Args:
            slot: index of the slot.
            image: bytes of the snapshot in the slot, in which the bytes around the tensors' values are already written.
            views: tensors that share the memory of `image`, one for each item of the layout.
            stager: copies the tensors.
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
        """Make later saves copy the frozen parameters into each slot again, because a fault may have damaged a slot."""
        self._held.clear()

    def _digests(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return a digest of each tensor: its CRC64-NVME if it is in CPU memory, otherwise its `weighted_sum`."""
        by_crc = map(is_memory, self._layout.locals)
        return [
            crc64nvme(bytes_of(tensor)) if crc else weighted_sum(tensor)
            for tensor, crc in zip(tensors, by_crc, strict=False)
        ]


def weighted_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's 8-byte words, each multiplied by a different odd number, modulo 2**64.

    The sum is the same on the CPU and on a GPU. A change of one word always changes the sum. A change of several words
    changes the sum with a probability of about 1 - 2**-64.
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
