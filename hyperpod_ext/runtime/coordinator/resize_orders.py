"""Orders to resize a job or to move ranks in it, and word of which nodes it would have: files in its run folder.

RUN_DIR/resizes/NAME.json      one order, written whole; its name tells when it came
RUN_DIR/nodes_wanted.json      for whoever starts nodes
RUN_DIR/node3.left             for whoever takes them back
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
    """All orders, by name, the oldest first. A file that is no order is left alone."""
    found = {}
    for file in json_files(run_dir / RESIZES):
        try:
            found[file.stem] = _ORDER.validate_json(read_regular(file, _LARGEST))
        except (OSError, ValueError):  # none of ours
            continue
    return found


def orders_were_left(run_dir: Path) -> bool:
    """Whether anybody has left an order, for this run of the job or an earlier one."""
    return (run_dir / RESIZES).is_dir()


def orders_due(
    orders: Mapping[str, Order], accepted: Collection[str], members: Collection[int]
) -> list[tuple[str, Order]]:
    """Those that can be carried out now, in the order of `orders`.

    One that still waits for its nodes when a later one is taken is overtaken for good: else a job would go back to an
    old size when they come at last.
    """
    latest = max(accepted, default="")
    return [(name, order) for name, order in orders.items() if name > latest and _joining(order) <= set(members)]


def orders_overtaken(orders: Mapping[str, Order], accepted: Collection[str]) -> list[tuple[str, Order]]:
    """Orders that will never be carried out, because a later one was accepted first."""
    latest = max(accepted, default="")
    return [(name, order) for name, order in orders.items() if name < latest and name not in accepted]


def _joining(order: Order) -> set[int]:
    return set(order.joining) if isinstance(order, ResizeOrder) else set()


def tell_wanted(run_dir: Path, nodes: Collection[int]) -> None:
    """Say which nodes the job would have. Where that cannot be written, it goes on with those that are there."""
    try:
        write_atomically(run_dir / WANTED, json.dumps({"nodes": sorted(nodes)}) + "\n")
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {run_dir / WANTED} cannot be written, no node is asked for: {error}\n")


def tell_left(run_dir: Path, node: int) -> None:
    """Say that nothing of this node is needed any more."""
    with _may_fail(run_dir / LEFT.format(node)) as file:
        file.touch()


def tell_here(run_dir: Path, node: int) -> None:
    """Say that this node is in use; it may have been let go before."""
    with _may_fail(run_dir / LEFT.format(node)) as file:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _may_fail(file: Path) -> Iterator[Path]:
    """A full or broken disk costs the word, not the node."""
    try:
        yield file
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {file} cannot be changed: {error.strerror}\n")
