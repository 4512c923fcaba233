"""XOR of bytes with numpy, at memory speed. numpy is imported at the first XOR: most processes need none."""

from __future__ import annotations


def xor_into(destination: memoryview, source: memoryview) -> None:
    """XOR the first bytes of `destination` with `source`, in place."""
    import numpy as np

    into = np.frombuffer(destination[: len(source)], np.uint8)
    np.bitwise_xor(into, np.frombuffer(source, np.uint8), out=into)


def fill_with_zeros(destination: memoryview) -> None:
    """Fill with zeros, the neutral element of XOR."""
    import numpy as np

    np.frombuffer(destination, np.uint8)[:] = 0
