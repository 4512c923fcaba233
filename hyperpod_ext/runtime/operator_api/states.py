"""What a pod answers its operator, and what it does then: state and request -> state, answer, order. Pure.

A call that does not fit what is known of the job is refused (409) and changes nothing. One that comes in a state in
which it means nothing changes no state, as with AWS's agent, so that an operator may ask twice.
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
"""After so long without a call of the operator another address may be it."""
_MEANWHILE = "; meanwhile "
IN_PROCESS, PROCESS_LEVEL, JOB_LEVEL = "in_process_restart", "process_level_restart", "job_level_restart"


class State(StrEnum):
    """Of the agent in a pod, in the operator's words."""

    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAULTED = "FAULTED"
    STOPPING = "STOPPING"
    SHUTDOWN = "SHUTDOWN"


class Order(StrEnum):
    """What the pod does."""

    BEGIN = "begin"
    """Start this node's agent; if one runs that was another node's, end that first."""
    RESUME = "resume"
    """Let the agent that was paused start workers."""
    PAUSE = "pause"
    """No rank trains until the agent is resumed; processes and memory stay."""
    REST = "rest"
    """The same, with time for ranks to leave their step and for what is due elsewhere; the pod is ready after that."""
    END = "end"
    """End the agent with all that it has started."""
    LEAVE = "leave"
    """The same, and end the pod's first process."""


@dataclass(frozen=True)
class NodeStart:
    """Of an agent in its job."""

    rank: int
    """Number of its node, unless the job has another one for it."""
    nodes: int
    """Of the job."""
    first_node: str
    """Address of the node that the others meet at."""
    log_rules: Sequence[Mapping[str, Any]] = ()
    """Rules on what rank 0 prints, as the operator sends them."""
    others: tuple[str, ...] = ()
    """Addresses of the other nodes, the first one's first."""
    address: str = ""
    """Of this node; empty: nobody has said."""
    faults: int = 0
    """Of the job so far, as the operator counts them."""


@dataclass(frozen=True)
class Pod:
    """What a pod knows, and tells its operator."""

    nodes: int
    """Of the job, as its spec has them, or as the operator says, where it is elastic."""
    sizes: frozenset[int] = frozenset()
    """Numbers of nodes that an elastic job may have."""
    state: State = State.INIT
    transitions: Mapping[str, str] = field(default_factory=dict)
    """When each state was last entered, ISO 8601 in UTC."""
    reason: str = ""
    message: str = ""
    restart_mode: str = IN_PROCESS
    rank: int = -1
    """Of the node, as the operator has it; -1: it has not said."""
    spare: bool = True
    fault_count: int = 0
    ip_version: str = ""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """Of the job's nodes."""
    master: str = ""
    log_rules: Sequence[Mapping[str, Any]] = ()
    agent_rank: int | None = None
    """Rank that the operator started the agent here with, paused or not; None: none runs."""
    agent_address: str = ""
    """Of this node then; empty: nobody had said."""
    agent_peers: frozenset[str] = frozenset()
    """Addresses of all nodes then."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[Mapping[str, Any]] = ()
    """What each rank here does, in the operator's words."""
    failed: frozenset[int] = frozenset()
    """Ranks whose fault is being mended."""
    labels: Mapping[str, str] = field(default_factory=dict)
    mended: int = 0
    """Faults that the job has met without the operator."""
    succeeded: bool = False
    """Whether the job has come to its end while the pod was stopped."""

    @property
    def node_start(self) -> NodeStart:
        """Where an agent that starts here belongs."""
        others = tuple(self.addresses[rank] for rank in sorted(self.addresses) if rank != self.rank)
        own, first = self.addresses.get(self.rank, ""), self.addresses.get(0, self.master)
        return NodeStart(self.rank, self.nodes, first, self.log_rules, others, own, self.fault_count)


@dataclass(frozen=True)
class Answer:
    """What becomes of a call."""

    pod: Pod
    status: int = OK
    """Of HTTP."""
    why: str = ""
    """Why it is refused."""
    orders: tuple[Order, ...] = ()
    gone: frozenset[str] = frozenset()
    """Addresses of pods that were nodes of the job when the agent here was started last, and are none any more."""


def enter(pod: Pod, state: State, now: str, reason: str = "", message: str = "") -> Pod:
    """`pod` in another state."""
    transitions = {**pod.transitions, state.value: now}
    return replace(pod, state=state, transitions=transitions, reason=reason, message=message)


# --- calls --------------------------------------------------------------------------------------


def start(pod: Pod, asked: Start, now: str) -> Answer:
    """`/start`: train, as this rank. An agent that runs here goes on, whatever its rank is now: nodes of the job keep
    their numbers."""
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
    updated = replace(updated, failed=frozenset[int]())  # what was being mended when the operator stopped the job
    return Answer(enter(updated, State.RUNNING, now, "Running"), orders=(order,), gone=gone)


def update(pod: Pod, asked: Ranks) -> Answer:
    """`/update`: another rank, other addresses, a spare or none any more."""
    if why := _misfit(pod, asked):
        return Answer(pod, CONFLICT, why)
    return Answer(_updated(pod, asked))


def stop(pod: Pod, asked: Stop, now: str) -> Answer:
    """`/stop`: no worker trains any more, and the pod is ready for `/start`."""
    if pod.state not in (State.RUNNING, State.FAULTED, State.COMPLETED):
        return Answer(pod)
    anew = pod.state is not State.RUNNING or (asked.restart_mode or "").lower() == JOB_LEVEL
    order = Order.END if anew else Order.REST if asked.is_graceful and (asked.timeout or 0) > 0 else Order.PAUSE
    return Answer(enter(pod, State.STOPPING, now), orders=(order,))


def shutdown(pod: Pod, now: str) -> Answer:
    """`/shutdown`: the pod's first process ends."""
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
    """Why what the operator says cannot be true of this job; empty: it can."""
    lines = asked.rankIps or []
    if asked.nnodes != pod.nodes and (asked.nnodes not in pod.sizes or pod.state is State.RUNNING):
        others = ", ".join(str(size) for size in sorted(pod.sizes - {pod.nodes}))
        may = f", and may have {others} after /stop" if others else ""
        return f"nnodes is {asked.nnodes}; the job has {pod.nodes} nodes{may}"
    if asked.rank < 0 or (asked.rank >= asked.nnodes and not asked.spare):
        return f"rank is {asked.rank}; ranks of nodes that train go from 0 to {asked.nnodes - 1}"
    if asked.faultCount < pod.fault_count:
        return f"faultCount is {asked.faultCount}; {pod.fault_count} was said before, so this is an older call"
    if pod.state is State.RUNNING and (asked.rank != pod.rank or asked.spare):
        return f"rank is {asked.rank}; this pod trains as rank {pod.rank}, and takes another one after /stop"
    if wrong := [line for line in lines if line.rank < 0 or not is_address(line.ip)]:
        return f"rankIps: {wrong[0].ip!r} of rank {wrong[0].rank} is no address of a node"
    if len({line.rank for line in lines}) < len(lines):
        return "rankIps names a rank twice"
    table = _table(pod, asked)
    uses = Counter(table.values())
    if two := sorted(rank for rank, address in table.items() if uses[address] > 1):
        return f"rankIps: ranks {', '.join(map(str, two))} have one address, {table[two[0]]}"
    if pod.state is State.RUNNING and _table(pod, asked).get(asked.rank) != pod.addresses.get(asked.rank):
        return "rankIps gives this pod, which trains, another address"
    return ""


def _incomplete(pod: Pod, asked: Start) -> str:
    if asked.rank >= asked.nnodes:
        return f"rank is {asked.rank}; a spare is started once it has a rank below {asked.nnodes}"
    table = _table(pod, asked)
    if missing := sorted(set(range(asked.nnodes)) - table.keys()) if table else []:
        return f"rankIps: no address of rank {', '.join(map(str, missing))}"
    return ""


# --- news of the job ----------------------------------------------------------------------------


def is_ready(pod: Pod, now: str, *, agent_runs: bool) -> Pod:
    """What `/stop` asked for is done, or the server is there."""
    ready = pod if agent_runs else replace(pod, agent_rank=None)
    return enter(ready, State.READY, now) if pod.state in (State.INIT, State.STOPPING) else ready


def made(pod: Pod, name: str, steps: Mapping[int, tuple[int, int]]) -> Pod:
    """With the newest step of each rank here, by its local rank: the job's progress, and what the workers do."""
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
    """The job meets a fault in place: the operator sees it, and has nothing to do."""
    if pod.state is not State.RUNNING:
        return pod
    return replace(pod, reason="MendingInPlace", message=cause, failed=pod.failed | {rank})


def waiting(pod: Pod, why: str) -> Pod:
    """As the operator sees a pod whose job cannot go on by itself: what it is to replace, it sees elsewhere."""
    return replace(pod, reason="Waiting", message=why) if why and pod.state is State.RUNNING else pod


def goes_on_without(pod: Pod, step: int, ranks: int, of: int) -> Pod:
    """The job goes on with `ranks` of all its ranks, until the others are replaced."""
    if pod.state is not State.RUNNING or pod.reason != "MendingInPlace":
        return pod
    cause = pod.message.partition(_MEANWHILE)[0]
    return replace(pod, message=f"{cause}{_MEANWHILE}{ranks} of {of} ranks train from step {step} on")


def fault_mended(pod: Pod, step: int) -> Pod:
    """All ranks train again."""
    if pod.state is not State.RUNNING or pod.reason != "MendingInPlace":
        return pod
    mended = pod.mended + 1
    labels = {**pod.labels, "hyperpod-ext/mended": str(mended), "hyperpod-ext/last-fault": pod.message[:256]}
    message = f"{pod.message}; mended in place, all ranks train from step {step} on"
    return replace(pod, reason="MendedInPlace", message=message, labels=labels, mended=mended, failed=frozenset[int]())


def job_ended(pod: Pod, now: str, *, succeeded: bool, message: str, restart_mode: str) -> Pod:
    """The agent here has ended by itself. A job that the operator has stopped may have gone on without what was lost,
    and to its end."""
    pod = replace(pod, agent_rank=None)
    if pod.state is not State.RUNNING:
        return replace(pod, succeeded=succeeded and pod.state in (State.STOPPING, State.READY))
    if succeeded:
        return enter(pod, State.COMPLETED, now)
    return replace(enter(pod, State.FAULTED, now, "JobFailed", message), restart_mode=restart_mode)


# --- what the operator reads --------------------------------------------------------------------


def status(pod: Pod, version: str) -> dict[str, Any]:
    """Answer of `/status`; what is empty is left out."""
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
        "priority": "True" if pod.state is State.READY and pod.agent_rank is not None else "",  # its memory is of use
    }
    return {name: value for name, value in fields.items() if value}


# --- who may order ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """Who gives this pod orders, where its spec names nobody: the address that gave the first one."""

    address: str = ""
    """Empty: nobody has ordered anything yet."""
    heard: float = 0.0
    """When it called last, if only to poll. Seconds."""


def why_refused(caller: str, allowed: Collection[str], members: Collection[str], operator: Caller, now: float) -> str:
    """Why `caller` may give no orders; empty: it may.

    With `allowed`, networks or addresses, only they may. Else the job's other pods may not, which have no reason to;
    nor may anybody while the operator, as far as it is known, still calls. An operator that was started again at
    another address comes to its turn once the former has been silent.
    """
    address = _plain(caller)
    if allowed:
        inside = any(address in ipaddress.ip_network(network, strict=False) for network in allowed)
        return "" if inside else f"{caller} is not in the networks of the job's operator"
    if address.is_loopback:
        return ""  # whoever is in this pod can end it anyway
    if str(address) in {str(_plain(member)) for member in members}:
        return f"{caller} is a pod of this job, and not its operator"
    silent_s = now - operator.heard
    if operator.address in ("", str(address)) or silent_s >= OPERATOR_SILENT_S:
        return ""
    return (
        f"{caller} is not the operator of this job: {operator.address} is, which called {silent_s:.0f} s ago; another "
        f"one is followed after {OPERATOR_SILENT_S:g} s of its silence, or where kubernetes.operator_addresses says so"
    )


def heard(operator: Caller, caller: str, now: float) -> Caller:
    """`caller` has asked something."""
    return replace(operator, heard=now) if str(_plain(caller)) == operator.address else operator


def obeyed(operator: Caller, caller: str, now: float) -> Caller:
    """`caller` has given an order, which was carried out."""
    address = _plain(caller)
    return operator if address.is_loopback else Caller(str(address), now)


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that came over an IPv6 socket is what it is."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
