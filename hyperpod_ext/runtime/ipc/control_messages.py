"""Messages between workers, agents and the coordinator, each declared once.

    worker ──▶ its agent ──▶ coordinator        reports of a rank; its agent adds the rank's number and other fields
    worker ◀── its agent ◀── coordinator        orders to all ranks of a generation

A reader decodes with the set of kinds that it accepts, and matches on the class. A damaged message is refused, with an
error that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Strict

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.ipc.declared import (
    Address,
    ByNumber,
    Count,
    Declared,
    Kinds,
    Listed,
    Port,
    Seconds,
)

Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""A number that may be negative, for no rank, no node, or no step yet."""
MonotonicTime = Annotated[float, Field(ge=-1e12, le=1e12)]
"""Seconds of the sender's monotonic clock."""
SaveId = Annotated[str, Field(pattern=r"^g\d{1,18}-s\d{1,18}$", examples=["g1-s3", "g7-s120"])]
"""Identifies a snapshot by generation and step."""
Shared = Annotated[
    str, Field(pattern=r"^(same|alike|shard)(:\d{1,18}(,\d{1,18})*)?$", examples=["same", "alike:0,2", "shard"])
]
"""Relation of a rank's state to the other ranks' state; see `snapshot/sharing.py`."""


# --- parts of messages ----------------------------------------------------------------------------


class LiveState(Declared):
    """The state in a process that has trained."""

    step: Count
    save_id: SaveId
    own_digest: str
    sharing: Shared
    world_size: Count = 0
    """World size of the state's layout; 0: any, because the state is the same on all ranks."""


class HeldSnapshot(Declared, extra="ignore"):
    """One snapshot in a node's memory."""

    rank: Count
    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    own_digest: str
    sharing: Shared
    content: str
    replica: bool = False
    """Whether it is a replica of another node's snapshot."""


class HeldCommit(Declared):
    """Snapshots of one save (step and generation) in a node's memory."""

    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    sharing: Shared
    replica: bool
    """Whether they are replicas of another node's snapshots."""
    ranks: Listed[Count]
    own_digests: Listed[str]
    """One digest for all ranks, or one for each."""
    contents: Listed[str]
    """One digest for all ranks, or one for each."""


class OnDisk(Declared, extra="ignore"):
    """A rank's snapshot on a disk of the node."""

    rank: Count
    step: Count
    save_id: SaveId
    world_size: Count
    own_digest: str
    sharing: Shared
    content: str
    tier: str
    """Kind of the tier."""
    url: str
    folder: str
    run: str
    """Name of the run of the job that saved it."""
    began: Count
    """First step of its generation."""


class DiskState(Declared):
    """The contents of a node's disks."""

    snapshots: Listed[OnDisk] = ()
    generation: Count = 0
    """Newest generation on any disk."""
    problems: Listed[str] = ()
    """Errors of unreadable disks and checkpoints."""


class HeldPiece(Declared, extra="ignore"):
    """A complete parity piece in a node's memory."""

    rank: Count
    """The node's own rank in the stripe: the piece has parts of all other ranks."""
    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    stripe: Listed[Count]
    """Ranks whose images protect each other."""


class DurableCheckpoint(Declared, extra="ignore"):
    """A checkpoint in a durable tier."""

    tier: str
    """Kind of the tier."""
    step: Count
    save_id: SaveId
    world_size: Count
    url: str
    folder: str


class RestoreSource(Declared):
    """A source of a rank's state."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    rank: Count
    save_id: str
    node: Number
    url: str
    folder: str
    tier: str = ""
    """Kind of the durable tier."""


class RestoreDecision(Declared):
    """One node's part of a restore decision."""

    step: Count
    sources: ByNumber[Listed[RestoreSource]]
    """Sources of the node's ranks, and of ranks to which one of them sends its live state."""
    others: Literal["self", "fresh"] = "self"
    """Source of all other ranks: their own process, or nothing (a start from step 0)."""
    save_id: str = ""
    """Snapshot id of the state in the processes of those other ranks."""
    stored: Listed[str] = ()
    """URLs of the durable tiers from which any rank restores."""


class RunningWorker(Declared):
    """A worker process of a node."""

    pid: Count
    step: Count
    joining: bool = False
    """Whether it waits for the next rank assignment."""


class RankHeartbeat(Declared):
    """The contents of a rank's heartbeat page."""

    rank: Count
    generation: Count
    step: Number
    phase: Annotated[int, Field(ge=0, le=max(Phase))]
    collectives: Count
    quiet_s: Seconds
    silent_s: Seconds
    stopped: bool


# --- reports of a rank ----------------------------------------------------------------------------


class Report(Declared):
    """A report of a rank or a node, in a generation."""

    sender, reader = "worker, agent", "agent, coordinator"

    generation: Count = 0
    """Generation of the sender; 0 before its first."""
    rank: Number = -1
    """Current rank, added by its agent; -1: a report of the agent itself, or not known yet."""


class WorkerHandshake(Declared):
    """A worker has started, or connects again after its connection broke."""

    sender, reader = "worker", "agent"
    type: Literal["handshake"] = "handshake"
    rank: Count
    pid: Count
    generation: Count = 0
    again: bool = False
    """Whether an earlier connection has broken, so that the agent answers with `resumed`."""
    received: Count = 0
    """Number of orders received on earlier connections."""


class WorkerResumed(Declared):
    """The agent accepts a worker that connects again. Both sides then repeat messages that the other has missed."""

    sender, reader = "agent", "worker"
    type: Literal["resumed"] = "resumed"
    received: Count
    """Number of this worker's reports that the agent has received."""


class Join(Report):
    """A rank waits for the next generation."""

    type: Literal["join"] = "join"
    live: LiveState | None
    """State in the process, if it is that of one complete step."""
    store_port: Port
    """Port of the rank's key-value server."""
    pid: Count = 0
    """Process id, added by the rank's agent."""


class Restored(Report):
    """A rank has restored and verified its state, or has failed to."""

    type: Literal["restored"] = "restored"
    attempt: Count
    error: str
    """Error of the restore; empty: it succeeded."""
    ranks: Listed[Count] = ()
    """Ranks of the node with this result; empty: only the sender."""


class Finished(Report):
    """The training function has returned."""

    type: Literal["finished"] = "finished"
    digest: str
    """Digest of the final state."""


class Event(Report):
    """An entry for the event log."""

    type: Literal["event"] = "event"
    event: str
    t: MonotonicTime
    """Time of the event."""
    fields: dict[str, Any]
    """Other fields of the event."""


class Failed(Report):
    """The training function has raised."""

    type: Literal["failed"] = "failed"
    cause: str
    step: Number
    final: bool
    """Whether retrying cannot help."""
    code: str
    hint: str
    place: str
    """Identifies the fault, to recognise its repetition."""
    process_unusable: bool = False
    """Whether the running process must be replaced, because its CUDA context is unusable."""
    t: MonotonicTime = 0.0
    """Time at which its agent received the report."""
    kind: FaultKind = "exception"
    """Kind of the fault, determined by its agent."""
    phase: str = ""
    """Phase of the step."""
    joined: Count = 0
    """Generation of the fault, if its agent has received a newer one meanwhile; otherwise 0."""


class StopAnswer(Report):
    """A rank answers whether it can stop after the requested step."""

    type: Literal["stop_answer"] = "stop_answer"
    number: Number
    """Number of the request."""
    can: bool
    at: Number
    """Current step of the rank; -1: none yet."""
    over: bool
    """Whether the rank makes no more steps."""


class RankStopped(Report):
    """A rank has stopped after the agreed step, and has saved the state that only it has."""

    type: Literal["rank_stopped"] = "rank_stopped"
    number: Number
    step: Count


class LookUp(Report):
    """A rank requests the addresses of these ranks' key-value servers."""

    type: Literal["look_up"] = "look_up"
    ranks: Listed[Count]


# --- reports of an agent --------------------------------------------------------------------------


class AgentHandshake(Declared):
    """An agent connects to the coordinator, or votes for an agent as the next coordinator."""

    sender, reader = "agent", "coordinator, agent"
    type: Literal["handshake"] = "handshake"
    node: Number
    id: str
    """Identifies this agent's process."""
    pid: Count
    peer: Address
    """Address of its memory server for other nodes."""
    address: Address
    """Address of the agent for other agents."""
    domain: str
    """Failure domain of the node."""
    generation: Count
    moved_in: Count = 0
    """Generation of the last change of rank numbers that its workers have received."""
    workers: ByNumber[RunningWorker]
    committed: Count
    """Newest step committed by any of the workers."""
    exited: ByNumber[Number]
    """Exit codes of workers that ended after their training was done."""
    leaving: bool = False
    """Whether the node has orders to leave the job."""
    clock: MonotonicTime | None = None
    job_state: dict[str, Any] | None
    """The job state, if this agent is one of the few that have it; null: it is not, or the job has not begun."""
    term: Count = 0
    """Term of the last coordinator known to this agent; 0: none yet."""

    @property
    def knows_job(self) -> bool:
        """Whether this agent's node has been in the job."""
        return self.job_state is not None or self.term > 0


class AskNumber(Declared):
    """A pod that was placed from outside of the job requests the state of a running job, and a node number in it."""

    sender, reader = "agent", "agent"
    type: Literal["ask_number"] = "ask_number"
    wanted: Number
    """Preferred node number."""
    listens: Address | None
    """Future address of the pod's agent. An earlier agent at this address has ended: its container was restarted."""


class FreeNumber(Declared):
    """An agent answers a request for a node number."""

    sender, reader = "agent", "agent"
    type: Literal["free_number"] = "free_number"
    node: Number | None
    """A free node number; null: this agent is not the coordinator, or no number is free."""
    knows_job: bool
    """Whether this agent's job has begun."""
    coordinator: Address | None
    """Address of the coordinator, if this agent knows it."""
    succeeded: bool = False
    """Whether this agent's job has succeeded."""


class Beat(Report):
    """The agent is alive."""

    sender, reader = "agent", "coordinator"
    type: Literal["beat"] = "beat"
    clock: MonotonicTime | None = None


class Acknowledged(Report):
    """The agent has received the job state."""

    sender, reader = "agent", "coordinator"
    type: Literal["acknowledged"] = "acknowledged"
    number: Count


class NodeJoin(Report):
    """Ranks of a node wait for the next generation."""

    sender, reader = "agent", "coordinator"
    type: Literal["node_join"] = "node_join"
    ranks: Listed[Count]
    pids: Listed[Count]
    """Process id of each rank."""
    store_ports: Listed[Port]
    """Port of each rank's key-value server."""
    lives: Listed[LiveState | None]
    """State in each rank's process, if it is that of one complete step; one for all ranks, or one for each."""
    held: Listed[HeldCommit]
    """Snapshots in the node's memory."""
    pieces: Listed[HeldPiece] = ()
    """Parity pieces in the node's memory."""
    disk: DiskState = DiskState()


class AskJobState(Report):
    """The agent lacks the base of a state change, and requests the full job state."""

    sender, reader = "agent", "coordinator"
    type: Literal["ask_job_state"] = "ask_job_state"


class Died(Report):
    """The process of a rank has ended."""

    sender, reader = "agent", "coordinator"
    type: Literal["died"] = "died"
    cause: str
    step: Number
    kind: FaultKind
    phase: str
    place: str
    exit_code: Number
    final: bool
    hint: str
    t: MonotonicTime
    code: str = "JobFailedError"
    """Error code of the job, if the job ends because of it."""
    joined: Count = 0
    """Newest generation that the process has requested to join; 0: none."""


class Exited(Report):
    """The process of a rank has ended after its training was done, or without joining any generation."""

    sender, reader = "agent", "coordinator"
    type: Literal["exited"] = "exited"
    code: Number
    last_line: str = ""
    """Last line of its output, if it failed."""


class Alive(Report):
    """All ranks of the node are alive: the answer to the liveness query."""

    sender, reader = "agent", "coordinator"
    type: Literal["alive"] = "alive"


class Decommissioned(Report):
    """Workers of the node have ended; these snapshots are in its memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["decommissioned"] = "decommissioned"
    held: Listed[HeldSnapshot]
    pieces: Listed[HeldPiece] = ()


class DurableAnswer(Report):
    """Checkpoints in the durable tiers."""

    sender, reader = "agent", "coordinator"
    type: Literal["durable"] = "durable"
    checkpoints: Listed[DurableCheckpoint]
    newest_generation: Count
    problems: Listed[str]
    unreachable: Listed[str]
    """Problems that may hide a newer checkpoint of a tier."""
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]] = ()
    """`exclude` of the request. The coordinator ignores the answer to an earlier request."""


class Stalled(Report):
    """A rank makes no progress."""

    sender, reader = "agent", "coordinator"
    type: Literal["stalled"] = "stalled"
    limit_s: Seconds
    """Time limit that the rank has exceeded."""


class Heartbeats(Report):
    """The heartbeats of the node's ranks: the answer to the hang query."""

    sender, reader = "agent", "coordinator"
    type: Literal["heartbeats"] = "heartbeats"
    heartbeats: Listed[RankHeartbeat]


class ServesPeers(Report):
    """The node has a new memory server."""

    sender, reader = "agent", "coordinator"
    type: Literal["serves_peers"] = "serves_peers"
    peer: Address


class Leave(Report):
    """The node has orders to leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["leave"] = "leave"


class HoldTraining(Report):
    """Stop all ranks until this node continues. They leave their step and keep processes and memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["hold"] = "hold"
    for_fault: bool = False
    """Whether the reason is a fault. A job that is training without the lost ranks does not stop then."""


class ResumeTraining(Report):
    """This node ends its `hold`."""

    sender, reader = "agent", "coordinator"
    type: Literal["resume"] = "resume"
    nodes: Count
    """New number of nodes, if the job is elastic; nodes with the lowest numbers stay."""
    gone: Listed[str] = ()
    """Addresses of nodes that were removed from outside of the job, so that they do not stay."""


class CancelJob(Report):
    """End the job, as requested at this agent."""

    sender, reader = "agent", "coordinator"
    type: Literal["cancel"] = "cancel"


class NodeBroken(Report):
    """The node has failed and must leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["broken"] = "broken"
    cause: str
    code: str
    """Error code of the job, if the job ends because of it."""
    lost: bool
    """Whether another node can take its place."""


class LastSnapshots(Report):
    """Training has ended; these snapshots are in the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["last_snapshots"] = "last_snapshots"
    held: Listed[HeldSnapshot]


class Uploaded(Report):
    """The node has uploaded its part of the last step, as far as possible."""

    sender, reader = "agent", "coordinator"
    type: Literal["uploaded"] = "uploaded"


# --- orders to agents -----------------------------------------------------------------------------


class Order(Declared):
    """An order to an agent."""

    sender, reader = "coordinator", "agent"


class Heard(Order):
    """The coordinator is alive."""

    type: Literal["beat"] = "beat"
    heard: Count
    """Number of events received from this agent."""


class JobState(Order):
    """The full job state, sent once to the few agents that may become the coordinator."""

    type: Literal["job_state"] = "job_state"
    job_state: dict[str, Any]
    digest: str = ""
    """Digest of this state, the base of the next change."""


class JobStateChange(Order):
    """The changes of the job state since the last message with it."""

    type: Literal["job_state_change"] = "job_state_change"
    number: Count
    """Number of the new job state."""
    before: str
    """Digest of the job state before the changes."""
    digest: str
    """Digest of the new job state."""
    changes: Listed[Annotated[tuple[Any, ...], Strict(False)]]
    """Each change: a path of keys and the new value; without a value, the key was removed."""


class JobNews(Order):
    """The state of the job that every agent needs, sent after each change. An agent with a coordinator also sends it to
    agents that vote for it."""

    type: Literal["job_news"] = "job_news"
    term: Count
    coordinator: Number
    """Node of the coordinator."""
    candidates: ByNumber[Address]
    """Agents with the job state. If this coordinator is lost, one of them takes its place."""
    members: Count
    """Number of members."""
    master_port: Port
    world_size: Count
    nodes: Count
    """Number of nodes with ranks."""
    moved_in: Count
    """Generation of the last change of rank numbers."""
    spares: bool
    """Whether a node waits without ranks."""
    servers_lost: Count
    """Number of memory servers lost so far, with or without their node."""
    faults: Listed[Annotated[tuple[Count, Count], Strict(False)]] = ()
    """Rank and step of each fault, if faults are injected."""


class NodeAssignment(Order):
    """The ranks and peers of this node, sent after each change."""

    type: Literal["assignment"] = "assignment"
    ranks: Listed[Count]
    peers: ByNumber[Address]
    """Memory servers of this node, of the holders of its replicas, and of its parity group."""
    domains: ByNumber[str]
    """Failure domain of each of these nodes."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node of this node's parity group; empty: no parity."""


class StopNode(Order):
    """Leave the job, which continues without this node, or cannot run on it."""

    type: Literal["stop"] = "stop"
    why: str
    hint: str


class EndJob(Order):
    """The job has ended."""

    type: Literal["end"] = "end"
    state: Literal["succeeded", "failed", "cancelled"]
    grace_s: float
    """Time limit for uploading existing snapshots; negative: upload none."""
    why: str = ""
    """Reason of the failure."""
    hint: str = ""


class Released(Order):
    """Leave the job, which no longer needs this node's memory."""

    type: Literal["released"] = "released"


class StartWorker(Order):
    """Start a process for this rank, and kill an existing one."""

    type: Literal["start_worker"] = "start_worker"
    rank: Count


class PrepareWorker(Order):
    """Start a process for this rank of the next rank assignment while the current ranks train."""

    type: Literal["prepare_worker"] = "prepare_worker"
    rank: Count
    world_size: Count


class EndWorkers(Order):
    """End the processes that wait for the next rank assignment, because that was cancelled."""

    type: Literal["end_workers"] = "end_workers"


class MembersReleased(Order):
    """Free the memory held for nodes that have left."""

    type: Literal["members_released"] = "members_released"
    world_size: Count


class DecommissionNode(Order):
    """End the node's workers, because its ranks are on other nodes now, and report the snapshots in its memory."""

    type: Literal["decommission"] = "decommission"


class ScheduleSave(Order):
    """Copy this step to this tier."""

    type: Literal["schedule_save"] = "schedule_save"
    kind: str
    """`peer`, or the kind of a durable tier."""
    step: Count


class AskDurableTiers(Order):
    """Report the checkpoints in the durable tiers."""

    type: Literal["ask_durable"] = "ask_durable"
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]]
    """URLs and save ids of refused checkpoints."""


class AskHeartbeats(Order):
    """Report the heartbeats of all ranks, because a rank makes no progress."""

    type: Literal["ask_heartbeats"] = "ask_heartbeats"


class AskAlive(Order):
    """Report whether all ranks are alive, because a collective broke without a reported death."""

    type: Literal["ask_alive"] = "ask_alive"
    generation: Count


class EndHung(Order):
    """Kill the process of a hanging rank."""

    type: Literal["end_hung"] = "end_hung"
    rank: Count
    cause: str


class SaveLast(Order):
    """End the workers, because all ranks are done, and report the snapshots in the node's memory."""

    type: Literal["save_last"] = "save_last"


class UploadSnapshot(Order):
    """Upload the node's part of this snapshot."""

    type: Literal["upload_snapshot"] = "upload_snapshot"
    save_id: str
    """Save id; empty: no snapshot exists on all ranks, so upload only those that are due already."""


# --- orders to all ranks of a generation ------------------------------------------------------------


class GenerationOrder(Declared):
    """An order to all agents and their workers."""

    sender, reader = "coordinator, agent", "agent, worker"

    generation: Count


class BeginGeneration(GenerationOrder):
    """Begin the generation: open process groups, and restore."""

    type: Literal["begin"] = "begin"
    decision: RestoreDecision
    world_size: Count
    full_size: Count | None = None
    """World size without missing ranks; null: no rank is missing."""
    addresses: ByNumber[Address]
    """Addresses of ranks' key-value servers: all in a small world; in a large one only new ones since the generation
    `follows`. Ranks look up the others."""
    follows: Count
    """Generation to which `addresses` are added; 0: earlier addresses are invalid."""
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str
    memory_every: Count | None = None
    """Steps between two snapshots in memory; null: the spec's value."""
    peer_step: Count | None = None
    """Next step to copy to peers; null: the policy's interval counts."""
    rank: Number = -1
    """Rank of the receiving worker, added by its agent."""


class TryNext(GenerationOrder):
    """Restore this instead, because a rank could not restore the earlier decision."""

    type: Literal["restore"] = "restore"
    decision: RestoreDecision
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str


class Addresses(GenerationOrder):
    """Use these addresses of ranks' key-value servers: the answer to a look-up."""

    type: Literal["addresses"] = "addresses"
    addresses: ByNumber[Address]


class GoOn(GenerationOrder):
    """Train, because every rank has the state of this step."""

    type: Literal["go"] = "go"
    step: Count


class AbortGeneration(GenerationOrder):
    """Leave the generation before this one, and join this one."""

    type: Literal["abort"] = "abort"
    rank: Number
    """Rank with the fault; -1: none."""
    moved: ByNumber[Count] = {}
    """New rank of each process that stays, by its old rank."""
    moved_in: Count = 0
    """Generation of that change of ranks; 0: no change."""
    drop_joining: bool = False
    """Whether to end processes that wait for the next rank assignment."""


class FinishTraining(GenerationOrder):
    """Finish, because all ranks are done."""

    type: Literal["finish"] = "finish"


class AskStop(GenerationOrder):
    """Answer whether this rank can stop after this step."""

    type: Literal["ask_stop"] = "ask_stop"
    number: Number
    step: Count
    ends: bool = False
    """Whether processes end at the stop, so that only saved state survives."""


class StopAtStep(GenerationOrder):
    """Stop at the requested step, because all ranks can."""

    type: Literal["stop_at"] = "stop_at"
    number: Number


class WithdrawStop(GenerationOrder):
    """Continue: the stop was withdrawn."""

    type: Literal["withdraw_stop"] = "withdraw_stop"
    number: Number


# --- sets of kinds by reader ----------------------------------------------------------------------

FromWorker = Join | Restored | Finished | Event | Failed | StopAnswer | RankStopped | LookUp
FromAgent = (
    FromWorker
    | Beat
    | Acknowledged
    | AskJobState
    | NodeJoin
    | Died
    | Exited
    | Alive
    | Decommissioned
    | DurableAnswer
    | Stalled
    | Heartbeats
    | ServesPeers
    | Leave
    | HoldTraining
    | ResumeTraining
    | CancelJob
    | NodeBroken
    | LastSnapshots
    | Uploaded
)
ToWorker = (
    BeginGeneration
    | TryNext
    | Addresses
    | GoOn
    | AbortGeneration
    | FinishTraining
    | AskStop
    | StopAtStep
    | WithdrawStop
)
ToAgent = (
    ToWorker
    | Heard
    | JobState
    | JobStateChange
    | JobNews
    | NodeAssignment
    | StopNode
    | EndJob
    | Released
    | StartWorker
    | PrepareWorker
    | EndWorkers
    | MembersReleased
    | DecommissionNode
    | ScheduleSave
    | AskDurableTiers
    | AskHeartbeats
    | AskAlive
    | EndHung
    | SaveLast
    | UploadSnapshot
)
WORKER_REPORTS: Kinds[FromWorker] = Kinds("report of a worker", "type", get_args(FromWorker))
AGENT_REPORTS: Kinds[FromAgent] = Kinds("report of an agent", "type", get_args(FromAgent))
AGENT_ORDERS: Kinds[ToAgent] = Kinds("order to an agent", "type", get_args(ToAgent))
WORKER_ORDERS: Kinds[ToWorker] = Kinds("order to a worker", "type", get_args(ToWorker))
