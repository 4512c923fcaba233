"""Faults that are ordered while a job runs. An order is a file in the job's run directory; agents and workers read it.

RUN_DIR/chaos/orders/NAME.json    one order, written atomically
RUN_DIR/chaos/injected/NAME       marks a fault that was or will be injected, so that it is injected only once
"""

from __future__ import annotations

from pathlib import Path

from hyperpod_ext.config.fault_injection import ORDERS, ChaosOrder, InjectedFault, NodeFault
from hyperpod_ext.files import json_files, make_private_folder, read_regular

_LARGEST = 1 << 20


def orders_folder(run_dir: Path) -> Path:
    return run_dir / ORDERS


def injected_folder(run_dir: Path) -> Path:
    return run_dir / "chaos" / "injected"


def read_orders(run_dir: Path) -> dict[str, InjectedFault | NodeFault]:
    """Return the orders that no process has taken yet, by name. Files that are not orders are ignored."""
    found = {}
    for file in json_files(orders_folder(run_dir)):
        try:
            if (injected_folder(run_dir) / file.stem).exists():
                continue
            found[file.stem] = ChaosOrder.model_validate_json(read_regular(file, _LARGEST)).fault
        except (OSError, ValueError):  # skip an incomplete file, or one of another program
            continue
    return found


def take(run_dir: Path, name: str) -> bool:
    """Return whether the caller must inject the fault `name`. Returns True only for the first call with this name in a
    job."""
    folder = injected_folder(run_dir)
    try:
        make_private_folder(folder)
        (folder / name).touch(exist_ok=False)
    except OSError:
        # do not inject: the order is taken already, or cannot be marked as taken and would be injected repeatedly
        return False
    return True
