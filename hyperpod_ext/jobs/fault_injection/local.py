"""Requests for faults in a running local job: files in the job's run folder, which agents and workers read."""

from __future__ import annotations

from hyperpod_ext.config.fault_injection import ORDERS, ChaosOrder, InjectedFault, NodeFault
from hyperpod_ext.files import make_private_folder, write_atomically
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.fault_injection.orders import check, name_of
from hyperpod_ext.jobs.local import store as local_store


def order(handle: JobHandle, fault: InjectedFault | NodeFault) -> str:
    """Request `fault`; return the name of the request.

    The fault is injected when its rank reaches the fault's step and phase.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job does not run.
        ConfigError: the job has no such rank or node.
    """
    submission = local_store.find_running(handle.name)
    job = submission.read_job()
    check(fault, job.world_size, job.nodes + job.spares)
    folder = submission.run_dir("main") / ORDERS
    make_private_folder(folder)
    earlier = len(list(folder.glob("*.json")))
    name = name_of(fault, f"{earlier:03d}")
    write_atomically(folder / f"{name}.json", ChaosOrder(fault=fault).model_dump_json() + "\n")
    return name
