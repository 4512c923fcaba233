"""Sum floating-point tensors as integers, so that the order of summation does not matter.

The bits of every number are divided into fixed bins of 16 bits: bin k has the bits of weight 2^(16k) to 2^(16k+15).
The sum of a tensor keeps a window of three bins: the bin of its largest number, and the next two bins below. Each bin
is summed as int32. If a larger number is added later, the window moves up, and its lowest bin is dropped, as if the bin
had never been summed. So the sum depends only on the added numbers, not on their order or on the ranks that add them.

The window of three bins has 48 bits, of which the largest number uses at least 33. The sum cannot overflow: each added
number is less than 2^48 units of the lowest bin, so the sum of `MOST` = 2^14 numbers is less than 2^62, and fits into
an int64. The sum of `MOST` numbers is less than 2^30 in one bin, and fits into an int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

MOST = 1 << 14
"""Maximum number of micro-batches in one sum, over all ranks."""
NONE, BAD = -128, 127
"""Special values of a bin's index. `NONE`: no number was added. `BAD`: a number that is not finite was added."""
_BITS, _BINS = 16, 3
_AT_ONCE = 1 << 15
"""Number of values that a CPU processes at once, few enough to fit into its cache."""
_LOWEST = -7
"""Lowest allowed index of a window's highest bin. A lower bin would need a scale outside of float32's range."""


def bin_of(largest: float) -> int:
    """Return the index of the bin with the highest bit of `largest`, a float32 magnitude; `BAD` if it is not finite."""
    if not math.isfinite(largest):
        return BAD
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    return max(_LOWEST, -(-exponent // _BITS) - 1) if largest else _LOWEST


def largest_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude in each tensor; NaN if the tensor contains NaN. Wait for the device only once."""
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), math.inf)).tolist()
    ends = [tensor.aminmax() for tensor in tensors if tensor.numel()]  # aminmax is faster than a norm on a CPU
    found = iter(torch.stack([torch.maximum(-low, high) for low, high in ends]).tolist() if ends else [])
    return [next(found) if tensor.numel() else 0.0 for tensor in tensors]


def add_bins(values: torch.Tensor, top: int, into: torch.Tensor) -> None:
    """Add the bins `top`, `top` - 1 and `top` - 2 of float `values` to the rows of int32 `into`, highest bin first.

    Bits below the three bins are dropped, which rounds towards zero.

    Args:
        values: n numbers, each with its highest bit in bin `top` or a lower bin.
        top: index of the highest of the three bins.
        into: sums of the three bins, of shape (3, n), changed in place.
    """
    scale = math.ldexp(1.0, -_BITS * top)
    for piece in _pieces(values):
        rest = values[piece].to(torch.float32) * scale  # the product is exact, because the scale is a power of two
        for row in into[:, piece]:
            digits = rest.to(torch.int32)
            row.add_(digits)
            rest.sub_(digits).mul_(1 << _BITS)


def _pieces(values: torch.Tensor) -> Iterator[slice]:
    size = _AT_ONCE if values.device.type == "cpu" else max(1, values.numel())
    return (slice(begin, begin + size) for begin in range(0, values.numel(), size))


class Sum:
    """This rank's sum of flat tensors with `numel` numbers each, as three int32 bins (12 bytes) per number."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.top = NONE
        self.bins = torch.zeros(_BINS, numel, dtype=torch.int32, device=device)

    def add(self, values: torch.Tensor, top: int) -> None:
        """Add `values`, whose largest magnitude has its highest bit in bin `top`."""
        self.raise_to(top)
        if self.top != BAD:
            add_bins(values.reshape(-1), self.top, self.bins)

    def raise_to(self, top: int) -> None:
        """Move the window of three bins up, so that its highest bin is at least `top`."""
        if top <= self.top:
            return
        up = min(top - self.top, _BINS)
        if self.top != NONE and top != BAD:
            self.bins[up:] = self.bins[: _BINS - up].clone()
            self.bins[:up] = 0
        self.top = top

    def pack(self, into: torch.Tensor) -> torch.Tensor:
        """Combine the three bins of each number into one int64 of `into`, in units of the lowest bin. Return `into`."""
        for piece in _pieces(into):
            into[piece] = self.bins[0, piece]
            for row in self.bins[1:, piece]:
                into[piece].bitwise_left_shift_(_BITS).add_(row)
        return into

    def packed(self) -> torch.Tensor:
        return self.pack(torch.empty(self.bins.shape[1], dtype=torch.int64, device=self.bins.device))

    def clear(self) -> None:
        """Reset the sum to zero."""
        self.top = NONE
        self.bins.zero_()


def value_of(packed: torch.Tensor, top: int) -> torch.Tensor:
    """Return the sums in `packed` as float32 numbers; all numbers are NaN if `top` is `BAD`.

    Args:
        packed: flat int64 sums, from `Sum.pack`.
        top: index of the highest bin of these sums.
    """
    values = torch.empty(packed.shape, dtype=torch.float32, device=packed.device)
    if top == BAD:
        return values.fill_(math.nan)
    scale = math.ldexp(1.0, _BITS * (top - _BINS + 1))
    for piece in _pieces(packed):
        values[piece] = packed[piece].to(torch.float64).mul_(scale)
    return values
