"""CPU seconds that the job's coordinator needs for a recovery and for a start, by number of nodes. CPU seconds are
measured up to 2,048 nodes, and extrapolated for more nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple


class Row(NamedTuple):
    """CPU seconds of the coordinator in a job with `nodes` nodes of eight workers each."""

    nodes: int
    start_s: float
    fault_s: float


MEASURED = (
    Row(16, 0.018, 0.010),
    Row(64, 0.032, 0.019),
    Row(256, 0.097, 0.056),
    Row(512, 0.194, 0.109),
    Row(1024, 0.453, 0.223),
    Row(2048, 0.994, 0.463),
)
"""Measurements of `make bench-control-plane`. A test compares MEASURED with docs/benchmarks/control-plane.json."""
MOST = MEASURED[-1].nodes
"""Largest measured number of nodes."""


def at(nodes: int) -> Row:
    """Return the CPU seconds of the coordinator for `nodes` nodes.

    The result is interpolated between measured numbers of nodes. Above the largest measured number of nodes, the
    CPU seconds for N nodes are proportional to N log N, like the number of messages.
    """
    if nodes >= MOST:
        last = MEASURED[-1]
        more = nodes * math.log2(nodes) / (MOST * math.log2(MOST))
        return Row(nodes, last.start_s * more, last.fault_s * more)
    index = bisect_left(MEASURED, nodes, key=lambda row: row.nodes)
    low, high = MEASURED[index - 1] if index else Row(0, 0.0, 0.0), MEASURED[index]
    share = (nodes - low.nodes) / (high.nodes - low.nodes)
    start_s, fault_s = (low[field] + share * (high[field] - low[field]) for field in (1, 2))
    return Row(nodes, start_s, fault_s)
