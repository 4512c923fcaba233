"""Faults that are ordered while a job runs: files in its run folder, which agents and workers look for.

RUN_DIR/chaos/orders/NAME.json    one order, written whole
RUN_DIR/chaos/injected/NAME       it has struck, or is about to: each strikes once
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
    """Orders that have not been taken yet, by name. A file that is no order is left alone."""
    found = {}
    for file in json_files(orders_folder(run_dir)):
        try:
            if (injected_folder(run_dir) / file.stem).exists():
                continue
            found[file.stem] = ChaosOrder.model_validate_json(read_regular(file, _LARGEST)).fault
        except (OSError, ValueError):  # half a file, or none of ours
            continue
    return found


def take(run_dir: Path, name: str) -> bool:
    """Whether it falls to the caller to carry out fault `name`: true once in a job."""
    folder = injected_folder(run_dir)
    try:
        make_private_folder(folder)
        (folder / name).touch(exist_ok=False)
    except OSError:  # it was taken before; or nobody can mark it, and it would strike again and again
        return False
    return True
