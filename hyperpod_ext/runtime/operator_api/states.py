"""A pod's answers to its operator, as pure functions: from a state and a request to a state, an answer and orders.

A request that contradicts the job's state is refused (409) and changes nothing. A request that means nothing in the
present state succeeds and changes nothing, as in AWS's agent, so that the operator may repeat requests.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hyperpod_ext.runtime.operator_api.requests import Ranks, Start, Stop, is_address

OK, FORBIDDEN, CONFLICT = 200, 403, 409
OPERATOR_SILENT_S = 60.0
"""Time in seconds without a request from the operator after which another address may become the operator."""
_MEANWHILE = "; meanwhile "
IN_PROCESS, PROCESS_LEVEL, JOB_LEVEL = "in_process_restart", "process_level_restart", "job_level_restart"


class State(StrEnum):
    """State of the agent in a pod, under the name that the operator uses."""

    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAULTED = "FAULTED"
    STOPPING = "STOPPING"
    SHUTDOWN = "SHUTDOWN"


class Order(StrEnum):
    """The pod's next action after a request was accepted."""

    BEGIN = "begin"
    """Start this node's agent as soon as an agent that is running has ended."""
    RESUME = "resume"
    """Let the paused agent continue: it starts its workers."""
    PAUSE = "pause"
    """Stop training on all ranks until the agent is resumed. Processes and memory are kept."""
    REST = "rest"
    """Pause, and report the pod as ready only when ranks have left their step and due uploads are done."""
    END = "end"
    """End the agent and all its processes."""
    LEAVE = "leave"
    """End the agent, all its processes, and the pod's first process."""


@dataclass(frozen=True)
class NodeStart:
    """Node numbers and addresses for an agent that starts."""

    rank: int
    """Number of the agent's node, which may get another number in a running job."""
    nodes: int
    """Number of the job's nodes."""
    first_node: str
    """Address of node 0, at which agents meet."""
    log_rules: Sequence[Mapping[str, Any]] = ()
    """Rules for the log of rank 0, in the operator's format."""
    others: tuple[str, ...] = ()
    """Addresses of the other nodes, in the order of their ranks."""
    address: str = ""
    """Address of this node; empty if unknown."""
    faults: int = 0
    """Number of faults that the operator has counted in this job so far."""


@dataclass(frozen=True)
class Pod:
    """State of a pod, as the pod reports it to the operator."""

    nodes: int
    """Number of the job's nodes: from the spec, or from the operator if the job is elastic."""
    sizes: frozenset[int] = frozenset()
    """Numbers of nodes with which an elastic job may run; empty if the job is not elastic."""
    state: State = State.INIT
    transitions: Mapping[str, str] = field(default_factory=dict)
    """Time (ISO 8601, UTC) at which the pod last entered each state, by state."""
    reason: str = ""
    message: str = ""
    restart_mode: str = IN_PROCESS
    rank: int = -1
    """Rank (node number) that the operator has assigned to this pod; -1 before the first assignment."""
    spare: bool = True
    fault_count: int = 0
    ip_version: str = ""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """Addresses of all nodes of the job, by rank."""
    master: str = ""
    log_rules: Sequence[Mapping[str, Any]] = ()
    agent_rank: int | None = None
    """Rank with which the operator started the agent that is running or paused; None if there is no agent."""
    agent_address: str = ""
    """Address of this node when its agent started; empty if unknown."""
    agent_peers: frozenset[str] = frozenset()
    """Addresses of all nodes when this node's agent started."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[Mapping[str, Any]] = ()
    """State of each rank on this node, under the operator's field names."""
    failed: frozenset[int] = frozenset()
    """Ranks that are recovering from a fault."""
    labels: Mapping[str, str] = field(default_factory=dict)
    mended: int = 0
    """Number of faults from which the job has recovered without the operator."""
    succeeded: bool = False
    """Whether the job succeeded while this pod was stopped."""

    @property
    def node_start(self) -> NodeStart:
        """Node numbers and addresses for an agent that starts now."""
        others = tuple(self.addresses[rank] for rank in sorted(self.addresses) if rank != self.rank)
        own, first = self.addresses.get(self.rank, ""), self.addresses.get(0, self.master)
        return NodeStart(self.rank, self.nodes, first, self.log_rules, others, own, self.fault_count)


@dataclass(frozen=True)
class Answer:
    """The result of a request: the pod's new state, the answer, and orders to carry out."""

    pod: Pod
    status: int = OK
    """HTTP status of the answer."""
    why: str = ""
    """Why the request was refused; empty if it was accepted."""
    orders: tuple[Order, ...] = ()
    gone: frozenset[str] = frozenset()
    """Addresses of pods that have left the job since this pod's agent started."""


def enter(pod: Pod, state: State, now: str, reason: str = "", message: str = "") -> Pod:
    """Return `pod` after it entered `state` at the time `now`."""
    transitions = {**pod.transitions, state.value: now}
    return replace(pod, state=state, transitions=transitions, reason=reason, message=message)


# --- requests -----------------------------------------------------------------------------------


def start(pod: Pod, asked: Start, now: str) -> Answer:
    """Answer `/start`, which orders the pod to train with a certain rank.

    A paused agent continues, even if the rank has changed, because the nodes of a job keep their numbers."""
    if why := _misfit(pod, asked) or _incomplete(pod, asked):
        return Answer(pod, CONFLICT, why)
    updated = _updated(pod, asked)
    if pod.state is not State.READY:
        return Answer(updated)
    own, peers = updated.addresses.get(asked.rank, ""), frozenset(updated.addresses.values())
    if pod.succeeded:
        return Answer(enter(replace(updated, succeeded=False), State.COMPLETED, now))
    same = own == pod.agent_address if own and pod.agent_address else asked.rank == pod.agent_rank
    order = Order.RESUME if same and pod.agent_rank is not None else Order.BEGIN
    gone = pod.agent_peers - peers if peers and order is Order.RESUME else frozenset()
    updated = replace(updated, agent_rank=asked.rank, agent_address=own, agent_peers=peers, restart_mode=IN_PROCESS)
    # no rank is recovering, because recoveries ended when the operator stopped the job
    updated = replace(updated, failed=frozenset[int]())
    return Answer(enter(updated, State.RUNNING, now, "Running"), orders=(order,), gone=gone)


def update(pod: Pod, asked: Ranks) -> Answer:
    """Answer `/update`, which sends a new rank, new addresses, or whether the pod is a spare now."""
    if why := _misfit(pod, asked):
        return Answer(pod, CONFLICT, why)
    return Answer(_updated(pod, asked))


def stop(pod: Pod, asked: Stop, now: str) -> Answer:
    """Answer `/stop`, which orders the pod to stop training. A stopped pod becomes ready for `/start`."""
    if pod.state not in (State.RUNNING, State.FAULTED, State.COMPLETED):
        return Answer(pod)
    anew = pod.state is not State.RUNNING or (asked.restart_mode or "").lower() == JOB_LEVEL
    order = Order.END if anew else Order.REST if asked.is_graceful and (asked.timeout or 0) > 0 else Order.PAUSE
    return Answer(enter(pod, State.STOPPING, now), orders=(order,))


def shutdown(pod: Pod, now: str) -> Answer:
    """Answer `/shutdown`, which orders the pod's first process to end."""
    if pod.state in (State.STOPPING, State.SHUTDOWN):
        return Answer(pod)
    return Answer(enter(pod, State.SHUTDOWN, now), orders=(Order.LEAVE,))


def _updated(pod: Pod, asked: Ranks) -> Pod:
    return replace(
        pod,
        nodes=asked.nnodes,
        rank=asked.rank,
        spare=asked.spare,
        fault_count=asked.faultCount,
        ip_version=pod.ip_version if asked.ipVersion is None or asked.rankIps is None else asked.ipVersion,
        addresses=_table(pod, asked),
        master=asked.master_addr,
        log_rules=asked.log_monitoring_configuration or pod.log_rules,
    )


def _table(pod: Pod, asked: Ranks) -> dict[int, str]:
    known = {**pod.addresses, **{line.rank: line.ip for line in asked.rankIps or ()}}
    return {rank: address for rank, address in known.items() if rank < asked.nnodes}


def _misfit(pod: Pod, asked: Ranks) -> str:
    """Return why the operator's values contradict the job; empty if they do not."""
    lines = asked.rankIps or []
    if asked.nnodes != pod.nodes and (asked.nnodes not in pod.sizes or pod.state is State.RUNNING):
        others = ", ".join(str(size) for size in sorted(pod.sizes - {pod.nodes}))
        may = f", and may have {others} after /stop" if others else ""
        return f"nnodes is {asked.nnodes}; the job has {pod.nodes} nodes{may}"
    if asked.rank < 0 or (asked.rank >= asked.nnodes and not asked.spare):
        return f"rank is {asked.rank}; ranks of nodes that train go from 0 to {asked.nnodes - 1}"
    if asked.faultCount < pod.fault_count:
        return f"faultCount is {asked.faultCount}; {pod.fault_count} was sent before, so this request is older"
    if pod.state is State.RUNNING and (asked.rank != pod.rank or asked.spare):
        return f"rank is {asked.rank}; this pod trains as rank {pod.rank}, and accepts another rank after /stop"
    if wrong := [line for line in lines if line.rank < 0 or not is_address(line.ip)]:
        return f"rankIps: {wrong[0].ip!r} of rank {wrong[0].rank} is no address of a node"
    if len({line.rank for line in lines}) < len(lines):
        return "rankIps names a rank twice"
    table = _table(pod, asked)
    uses = Counter(table.values())
    if two := sorted(rank for rank, address in table.items() if uses[address] > 1):
        return f"rankIps: ranks {', '.join(map(str, two))} have the same address, {table[two[0]]}"
    if pod.state is State.RUNNING and _table(pod, asked).get(asked.rank) != pod.addresses.get(asked.rank):
        return "rankIps has another address for this pod, which is training"
    return ""


def _incomplete(pod: Pod, asked: Start) -> str:
    if asked.rank >= asked.nnodes:
        return f"rank is {asked.rank}; a spare is started when it has a rank below {asked.nnodes}"
    table = _table(pod, asked)
    if missing := sorted(set(range(asked.nnodes)) - table.keys()) if table else []:
        return f"rankIps: no address of rank {', '.join(map(str, missing))}"
    return ""


# --- events of the job --------------------------------------------------------------------------


def is_ready(pod: Pod, now: str, *, agent_runs: bool) -> Pod:
    """Return `pod` in state READY, if the server has just started or `/stop` was carried out."""
    ready = pod if agent_runs else replace(pod, agent_rank=None)
    return enter(ready, State.READY, now) if pod.state in (State.INIT, State.STOPPING) else ready


def made(pod: Pod, name: str, steps: Mapping[int, tuple[int, int]]) -> Pod:
    """Return `pod` with the progress in `steps`, which has rank and newest step by local rank."""
    if not steps:
        return pod
    workers = [
        {
            "rank": rank,
            "group_rank": pod.rank,
            "local_rank": local_rank,
            "failed": rank in pod.failed,
            "data": json.dumps({"step": step}),
        }
        for local_rank, (rank, step) in sorted(steps.items())
    ]
    newest = max(step for _, step in steps.values())
    return replace(pod, workers=workers, progress={name: {"progressData": "", "progressCount": newest}})


def fault_seen(pod: Pod, cause: str, rank: int = -1) -> Pod:
    """Return `pod` after a fault that the job handles itself. The operator sees the fault, but need not act."""
    if pod.state is not State.RUNNING:
        return pod
    return replace(pod, reason="MendingInPlace", message=cause, failed=pod.failed | {rank})


def waiting(pod: Pod, why: str) -> Pod:
    """Return `pod` for a job that cannot continue without the operator. The operator itself finds lost pods."""
    return replace(pod, reason="Waiting", message=why) if why and pod.state is State.RUNNING else pod


def goes_on_without(pod: Pod, step: int, ranks: int, of: int) -> Pod:
    """Return `pod` for a job that continues with `ranks` of its `of` ranks until lost ranks are replaced."""
    if pod.state is not State.RUNNING or pod.reason != "MendingInPlace":
        return pod
    cause = pod.message.partition(_MEANWHILE)[0]
    return replace(pod, message=f"{cause}{_MEANWHILE}{ranks} of {of} ranks train from step {step} on")


def fault_mended(pod: Pod, step: int) -> Pod:
    """Return `pod` after a recovery: all ranks train again."""
    if pod.state is not State.RUNNING or pod.reason != "MendingInPlace":
        return pod
    mended = pod.mended + 1
    labels = {**pod.labels, "hyperpod-ext/mended": str(mended), "hyperpod-ext/last-fault": pod.message[:256]}
    message = f"{pod.message}; mended in place, all ranks train from step {step} on"
    return replace(pod, reason="MendedInPlace", message=message, labels=labels, mended=mended, failed=frozenset[int]())


def job_ended(pod: Pod, now: str, *, succeeded: bool, message: str, restart_mode: str) -> Pod:
    """Return `pod` after its agent has ended on its own.

    Even a job that the operator has stopped may end, because it may have continued without lost nodes."""
    pod = replace(pod, agent_rank=None)
    if pod.state is not State.RUNNING:
        return replace(pod, succeeded=succeeded and pod.state in (State.STOPPING, State.READY))
    if succeeded:
        return enter(pod, State.COMPLETED, now)
    return replace(enter(pod, State.FAULTED, now, "JobFailed", message), restart_mode=restart_mode)


# --- the answer to /status ----------------------------------------------------------------------


def status(pod: Pod, version: str) -> dict[str, Any]:
    """Return the answer to `/status`, without fields that are empty."""
    fields: dict[str, Any] = {
        "status": pod.state.value.lower(),
        "transitions": dict(pod.transitions),
        "reason": pod.reason,
        "message": pod.message,
        "restartMode": pod.restart_mode,
        "worker_data": list(pod.workers),
        "rank_labels": {str(max(pod.rank, 0)): dict(pod.labels)} if pod.labels else {},
        "ipversion": pod.ip_version,
        "progress": dict(pod.progress),
        "agent_version": version,
        "assigned_rank": str(pod.rank) if pod.rank >= 0 else "",
        "spare": str(pod.spare),
        # "True" if the pod's memory still has snapshots of the job
        "priority": "True" if pod.state is State.READY and pod.agent_rank is not None else "",
    }
    return {name: value for name, value in fields.items() if value}


# --- access control -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """The operator of a pod whose spec does not name one: the address that sent the first order."""

    address: str = ""
    """IP address of the operator; empty if no order was sent yet."""
    heard: float = 0.0
    """Time of the operator's last request, polls included, in seconds of the monotonic clock."""


def why_refused(caller: str, allowed: Collection[str], members: Collection[str], operator: Caller, now: float) -> str:
    """Return why orders from the address `caller` are refused; empty if they are accepted.

    If `allowed` is not empty, only its networks and addresses may send orders. If `allowed` is empty, only the
    operator's address may send orders. Without an operator, or once the operator has sent no request for a while, any
    address except other pods of the job may send orders. Therefore an operator that was restarted at another address is
    accepted after a while.
    """
    address = _plain(caller)
    if allowed:
        inside = any(address in ipaddress.ip_network(network, strict=False) for network in allowed)
        return "" if inside else f"{caller} is not in the networks of the job's operator"
    if address.is_loopback:
        return ""  # accept loopback: a process of this pod could end the pod anyway
    if str(address) in {str(_plain(member)) for member in members}:
        return f"{caller} is a pod of this job, and not its operator"
    silent_s = now - operator.heard
    if operator.address in ("", str(address)) or silent_s >= OPERATOR_SILENT_S:
        return ""
    return (
        f"{caller} is not the operator of this job: {operator.address} is, and called {silent_s:.0f} s ago; another "
        f"address is accepted {OPERATOR_SILENT_S:g} s after its last call, or if kubernetes.operator_addresses has it"
    )


def heard(operator: Caller, caller: str, now: float) -> Caller:
    """Return the operator with the time of this request, if `caller` is the operator."""
    return replace(operator, heard=now) if str(_plain(caller)) == operator.address else operator


def obeyed(operator: Caller, caller: str, now: float) -> Caller:
    """Return the operator after an accepted order: the caller, unless it is a process of this pod."""
    address = _plain(caller)
    return operator if address.is_loopback else Caller(str(address), now)


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address. An IPv4 address that is mapped to IPv6 is returned as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
