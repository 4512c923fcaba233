"""Requests for faults in a running HyperPodPyTorchJob.

A request is a file in the pod of the fault's rank. The pod's agent, or the rank itself, reads the file. `kubectl exec`
writes the file, so that only users who may run commands in the pods can request faults.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from hyperpod_ext.config.fault_injection import ORDERS, ChaosOrder, InjectedFault, NodeFault
from hyperpod_ext.errors import ConflictError, Problem, UnreachableError, UnsupportedError
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.fault_injection.orders import check, name_of
from hyperpod_ext.jobs.kubernetes import jobs
from hyperpod_ext.jobs.kubernetes.details import in_pod, kept_spec, pods_of
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD

_NOT_HERE = 9
_WRITE = f"""\
cd "$HPX_RUN_DIR"
[ -e "logs/rank$1.log" ] || [ -e "events-rank$1.jsonl" ] || exit {_NOT_HERE}
mkdir -p {ORDERS}
cat >{ORDERS}/.new
mv {ORDERS}/.new "{ORDERS}/$0.json"
"""
"""Shell commands that store stdin as the request `$0` in a pod, if the pod has a log or event file of rank `$1`."""


def order(handle: JobHandle, fault: InjectedFault | NodeFault) -> str:
    """Request a fault as `targets.Faults` defines it; return the name of the request.

    Only the pods know their ranks, so the pod that probably has the rank is tried first, then the other pods.
    """
    job, state = kept_spec(handle), jobs.status(HYPERPOD, handle).state
    if job is None or not job.has_agent:
        why = "was not created by this version of hp-ext" if job is None else f"is of mode {job.mode}"
        hint = "run a command such as `kill -9 PID` in a pod with `hp-ext exec` instead"
        raise UnsupportedError([Problem(f"faults cannot be injected into {handle.name}, which {why}", hint=hint)])
    running = pods_of(jobs.client_of(handle), handle, running=True)
    pods = [str(pod["metadata"]["name"]) for pod in running]
    if isinstance(fault, NodeFault) and job.kubernetes.launcher != "ours":
        which = ", ".join(pods) or "its pods"
        hint = f"to lose a node, run `kubectl delete pod --force --grace-period=0 NAME` for one of {which}"
        raise UnsupportedError([Problem("hyperpodrun does not support faults of a whole node", hint=hint)])
    if state != "running" or not pods:
        raise ConflictError(f"{handle.name} is not running ({state})", hint=f"`hp-ext describe {handle}` shows why")
    most = job.elastic.max_nodes if job.elastic else job.nodes
    check(fault, most * job.workers_per_node, most)
    name, text = name_of(fault, f"{time.time():.3f}"), ChaosOrder(fault=fault).model_dump_json() + "\n"
    rank = fault.rank if isinstance(fault, InjectedFault) else fault.node * job.workers_per_node
    likely = rank // job.workers_per_node
    for pod in [*pods[likely : likely + 1], *pods[:likely], *pods[likely + 1 :]]:
        if _took(in_pod(handle, pod, ["sh", "-ec", _WRITE, name, str(rank)]), text):
            return name
    raise ConflictError(f"no pod of {handle.name} has rank {rank} yet", hint="wait until the job trains")


def _took(command: Sequence[str], text: str) -> bool:
    """Run the kubectl command with the request as standard input; return whether the pod stored the request."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        hint = "install kubectl, which runs commands in pods"
        raise UnreachableError("kubectl is not installed on this machine", hint=hint) from None
    if done.returncode not in (0, _NOT_HERE):
        raise UnreachableError(
            f"a pod refused the request: {done.stderr.strip()[-300:]}",
            hint="check that `kubectl exec` works for this pod",
        )
    return done.returncode == 0
