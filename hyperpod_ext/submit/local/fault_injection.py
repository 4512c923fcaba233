"""Faults ordered for a local job that runs: a file in its run folder, which its agents and workers look for."""

from __future__ import annotations

import json
import secrets

from hyperpod_ext.config.fault_injection import ORDERS, ChaosOrder, InjectedFault, NodeFault
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError, Problem
from hyperpod_ext.files import write_atomically
from hyperpod_ext.submit.contract.handle import JobHandle
from hyperpod_ext.submit.local import store as local_store


def order(handle: JobHandle, fault: InjectedFault | NodeFault) -> str:
    """Order `fault`; returns the name of the order. It strikes when its rank comes to its place.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: it does not run.
        ConfigError: it has no such rank or node.
    """
    submission = local_store.latest(handle.name)
    if submission is None:
        raise NotFoundError(f"there is no local job named {handle.name}", hint="`hp-ext status` lists them")
    if not submission.is_running():
        raise ConflictError(f"{handle.name} does not run", hint="`hp-ext create-job` starts it again")
    job = json.loads(submission.job_file.read_text())
    ranks, nodes = job["nodes"] * job["workers_per_node"], job["nodes"] + job.get("spares", 0)
    if isinstance(fault, InjectedFault) and fault.rank >= ranks:
        raise ConfigError([Problem(f"there is no rank {fault.rank}", source="--rank", hint=f"ranks: 0 to {ranks - 1}")])
    if isinstance(fault, NodeFault) and fault.node >= nodes:
        raise ConfigError([Problem(f"there is no node {fault.node}", source="--node", hint=f"nodes: 0 to {nodes - 1}")])
    folder = submission.run_dir("main") / ORDERS
    folder.mkdir(parents=True, exist_ok=True)
    earlier = len(list(folder.glob("*.json")))
    name = f"{earlier:03d}-{fault.kind}-{secrets.token_hex(3)}"
    write_atomically(folder / f"{name}.json", ChaosOrder(fault=fault).model_dump_json() + "\n")
    return name
