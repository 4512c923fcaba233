"""XOR of bytes with numpy. numpy is imported at the first use, because most processes compute no XOR."""

from __future__ import annotations


def xor_into(destination: memoryview, source: memoryview) -> None:
    """XOR `source` into the first bytes of `destination`, in place."""
    import numpy as np

    into = np.frombuffer(destination[: len(source)], np.uint8)
    np.bitwise_xor(into, np.frombuffer(source, np.uint8), out=into)


def fill_with_zeros(destination: memoryview) -> None:
    """Fill `destination` with zeros, the neutral element of XOR."""
    import numpy as np

    np.frombuffer(destination, np.uint8)[:] = 0
