"""Orders to resize a job, and word of which nodes it would have: files in its run folder.

RUN_DIR/resizes/NAME.json      one order, written whole; its name tells when it came
RUN_DIR/nodes_wanted.json      for whoever starts nodes
RUN_DIR/node3.left             for whoever takes them back
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from hyperpod_ext.config.resize import LEFT, RESIZES, WANTED, ResizeOrder
from hyperpod_ext.files import write_atomically


def read_orders(run_dir: Path) -> dict[str, ResizeOrder]:
    """All orders, by name, the oldest first. A file that is no order is left alone."""
    folder = run_dir / RESIZES
    found = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found[file.stem] = ResizeOrder.model_validate_json(file.read_bytes())
        except (OSError, ValueError):  # none of ours
            continue
    return found


def orders_due(
    orders: Mapping[str, ResizeOrder], accepted: Collection[str], members: Collection[int]
) -> list[tuple[str, ResizeOrder]]:
    """Those that can be carried out now, in the order of `orders`.

    One that still waits for its nodes when a later one is taken is overtaken for good: else a job would go back to an
    old size when they come at last.
    """
    latest = max(accepted, default="")
    return [(name, order) for name, order in orders.items() if name > latest and set(order.joining) <= set(members)]


def tell_wanted(run_dir: Path, nodes: Collection[int]) -> None:
    """Say which nodes the job would have."""
    write_atomically(run_dir / WANTED, json.dumps({"nodes": sorted(nodes)}) + "\n")


def tell_left(run_dir: Path, node: int) -> None:
    """Say that nothing of this node is needed any more."""
    (run_dir / LEFT.format(node)).touch()


def tell_here(run_dir: Path, node: int) -> None:
    """Say that this node is in use; it may have been let go before."""
    (run_dir / LEFT.format(node)).unlink(missing_ok=True)
