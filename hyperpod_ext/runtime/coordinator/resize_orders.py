"""Reads and writes files in the run folder: orders to resize a job or to move ranks, and the list of nodes that the job
needs.

RUN_DIR/resizes/NAME.json      one order, written atomically; names sort by time
RUN_DIR/nodes_wanted.json      nodes that the job needs, for the process that starts nodes
RUN_DIR/node3.left             marks that the job no longer needs node 3
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ext.config.resize import LEFT, RESIZES, WANTED, Order, ResizeOrder
from hyperpod_ext.files import json_files, read_regular, write_atomically

_LARGEST = 1 << 20
_ORDER: TypeAdapter[Order] = TypeAdapter(Order)


def read_orders(run_dir: Path) -> dict[str, Order]:
    """Read all order files. Returns a map from name to order, oldest first. Invalid order files are skipped."""
    found = {}
    for file in json_files(run_dir / RESIZES):
        try:
            found[file.stem] = _ORDER.validate_json(read_regular(file, _LARGEST))
        except (OSError, ValueError):  # skip an invalid or unreadable file
            continue
    return found


def orders_were_left(run_dir: Path) -> bool:
    """Return whether `run_dir` contains or has contained orders, for this run of the job or for an earlier run."""
    return (run_dir / RESIZES).is_dir()


def orders_due(
    orders: Mapping[str, Order], accepted: Collection[str], members: Collection[int]
) -> list[tuple[str, Order]]:
    """Return the orders that can be carried out now, oldest first.

    An order can be carried out if it is newer than all accepted orders, and all nodes that it adds are members. An
    order is dropped for good once a newer order was accepted, even if its nodes join later. If older orders were still
    carried out, the job would go back to an outdated size.
    """
    latest = max(accepted, default="")
    return [(name, order) for name, order in orders.items() if name > latest and _joining(order) <= set(members)]


def orders_overtaken(orders: Mapping[str, Order], accepted: Collection[str]) -> list[tuple[str, Order]]:
    """Return the orders that will never be carried out, because a newer order was accepted before them."""
    latest = max(accepted, default="")
    return [(name, order) for name, order in orders.items() if name < latest and name not in accepted]


def _joining(order: Order) -> set[int]:
    return set(order.joining) if isinstance(order, ResizeOrder) else set()


def tell_wanted(run_dir: Path, nodes: Collection[int]) -> None:
    """Write the file with the nodes that the job needs. If writing fails, the error is logged, and the job continues
    with its current nodes."""
    try:
        write_atomically(run_dir / WANTED, json.dumps({"nodes": sorted(nodes)}) + "\n")
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {run_dir / WANTED} cannot be written, so no new node is requested: {error}\n")


def tell_left(run_dir: Path, node: int) -> None:
    """Create the file that marks `node` as no longer needed by the job."""
    with _may_fail(run_dir / LEFT.format(node)) as file:
        file.touch()


def tell_here(run_dir: Path, node: int) -> None:
    """Delete the file that marks `node` as no longer needed, which an earlier agent of the node may have created."""
    with _may_fail(run_dir / LEFT.format(node)) as file:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _may_fail(file: Path) -> Iterator[Path]:
    """Log an OSError of the `with` block instead of raising it: a full or broken disk must not stop the agent."""
    try:
        yield file
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {file} cannot be changed: {error.strerror}\n")
