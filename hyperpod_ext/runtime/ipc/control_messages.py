"""Messages between workers, agents and the coordinator. Each kind is declared once.

    worker ──▶ its agent ──▶ coordinator        reports of a rank; the agent adds the rank's number and other fields
    worker ◀── its agent ◀── coordinator        orders to all ranks of a generation

A reader decodes a message with the set of kinds that it accepts, and matches on the class. A damaged message is refused
with an error that names the field.
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
"""A number that is negative if there is no rank, no node, or no step yet."""
MonotonicTime = Annotated[float, Field(ge=-1e12, le=1e12)]
"""A time in seconds of the sender's monotonic clock."""
SaveId = Annotated[str, Field(pattern=r"^g\d{1,18}-s\d{1,18}$", examples=["g1-s3", "g7-s120"])]
"""Id of a snapshot, from its generation and step."""
Shared = Annotated[
    str, Field(pattern=r"^(same|alike|shard)(:\d{1,18}(,\d{1,18})*)?$", examples=["same", "alike:0,2", "shard"])
]
"""How a rank's state relates to the state of other ranks; see `snapshot/sharing.py`."""


# --- parts of messages ----------------------------------------------------------------------------


class LiveState(Declared):
    """State in the memory of a process that has trained."""

    step: Count
    save_id: SaveId
    own_digest: str
    sharing: Shared
    world_size: Count = 0
    """World size for which the state is laid out; 0 if any, because the state is the same on all ranks."""


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
    """Whether the snapshot is a replica of another node's snapshot."""


class HeldCommit(Declared):
    """All snapshots of one save (step and generation) in a node's memory."""

    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    sharing: Shared
    replica: bool
    """Whether the snapshots are replicas of another node's snapshots."""
    ranks: Listed[Count]
    own_digests: Listed[str]
    """Digests of the ranks' own state: one for all ranks, or one for each rank."""
    contents: Listed[str]
    """Digests of the snapshots' contents: one for all ranks, or one for each rank."""


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
    """Kind of the tier that uses this disk."""
    url: str
    folder: str
    run: str
    """Name of the run of the job that saved the snapshot."""
    began: Count
    """First step of the generation that saved the snapshot."""


class DiskState(Declared):
    """The contents of a node's disks."""

    snapshots: Listed[OnDisk] = ()
    generation: Count = 0
    """Newest generation on any disk of the node."""
    problems: Listed[str] = ()
    """One sentence for each unreadable disk or checkpoint."""


class HeldPiece(Declared, extra="ignore"):
    """A complete parity piece in a node's memory."""

    rank: Count
    """Rank of this node in the stripe. The piece has parts of all other ranks in the stripe."""
    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    stripe: Listed[Count]
    """Ranks whose images protect each other by parity."""


class DurableCheckpoint(Declared, extra="ignore"):
    """A checkpoint in a durable tier."""

    tier: str
    """Kind of the durable tier."""
    step: Count
    save_id: SaveId
    world_size: Count
    url: str
    folder: str


class RestoreSource(Declared):
    """A source from which a rank restores its state."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    rank: Count
    save_id: str
    node: Number
    url: str
    folder: str
    tier: str = ""
    """Kind of the durable tier, if the source is durable."""


class RestoreDecision(Declared):
    """The part of a restore decision that one node needs."""

    step: Count
    sources: ByNumber[Listed[RestoreSource]]
    """Sources of the node's ranks, and of all ranks to which one of them sends its live state."""
    others: Literal["self", "fresh"] = "self"
    """Source of all other ranks: their own process, or nothing, which is a start from step 0."""
    save_id: str = ""
    """Save id of the state in the processes of all other ranks."""
    stored: Listed[str] = ()
    """URLs of the durable tiers from which at least one rank restores."""


class RunningWorker(Declared):
    """A worker process of a node."""

    pid: Count
    step: Count
    joining: bool = False
    """Whether the worker waits for the next rank assignment."""


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
    """A report of a rank or a node in one generation."""

    sender, reader = "worker, agent", "agent, coordinator"

    generation: Count = 0
    """Generation of the sender; 0 before its first generation."""
    rank: Number = -1
    """Current rank, added by the rank's agent. -1 if the report is of the agent itself, or if the rank is not known
    yet."""


class WorkerHandshake(Declared):
    """A worker has started, or connects again because its connection broke."""

    sender, reader = "worker", "agent"
    type: Literal["handshake"] = "handshake"
    rank: Count
    pid: Count
    generation: Count = 0
    again: bool = False
    """Whether an earlier connection broke. The agent then answers with `resumed`."""
    received: Count = 0
    """Number of orders received on earlier connections."""


class WorkerResumed(Declared):
    """The agent accepts a worker that connects again. Both sides then send again the messages that the other side
    missed."""

    sender, reader = "agent", "worker"
    type: Literal["resumed"] = "resumed"
    received: Count
    """Number of this worker's reports that the agent has received."""


class Join(Report):
    """A rank waits for the next generation."""

    type: Literal["join"] = "join"
    live: LiveState | None
    """State in the process, if it is the state after one complete step."""
    store_port: Port
    """Port of the rank's key-value server."""
    pid: Count = 0
    """Process id, added by the rank's agent."""


class Restored(Report):
    """A rank has restored and verified its state, or has failed to do so."""

    type: Literal["restored"] = "restored"
    attempt: Count
    error: str
    """Error of the restore; empty if the restore succeeded."""
    ranks: Listed[Count] = ()
    """Ranks of the node with this result; empty if only the sender has it."""


class Finished(Report):
    """The training function has returned."""

    type: Literal["finished"] = "finished"
    digest: str
    """Digest of the final state."""


class Event(Report):
    """An entry for the job's event log."""

    type: Literal["event"] = "event"
    event: str
    t: MonotonicTime
    """Time of the event, by the sender's clock."""
    fields: dict[str, Any]
    """All other fields of the event."""


class Failed(Report):
    """The training function has raised an exception."""

    type: Literal["failed"] = "failed"
    cause: str
    step: Number
    final: bool
    """Whether a retry cannot help."""
    code: str
    hint: str
    place: str
    """Place of the fault, by which its repetition is recognised."""
    process_unusable: bool = False
    """Whether the process must be replaced although it runs, because its CUDA context is unusable."""
    t: MonotonicTime = 0.0
    """Time at which the rank's agent received the report."""
    kind: FaultKind = "exception"
    """Kind of the fault, which the rank's agent determines."""
    phase: str = ""
    """Phase of the step in which the function raised."""
    joined: Count = 0
    """Generation of the fault, if the agent has since received a newer generation; otherwise 0."""


class StopAnswer(Report):
    """A rank answers whether it can stop after the requested step."""

    type: Literal["stop_answer"] = "stop_answer"
    number: Number
    """Number of the request to stop."""
    can: bool
    at: Number
    """Step that the rank is making; -1 if it has begun none."""
    over: bool
    """Whether the rank makes no more steps."""


class RankStopped(Report):
    """A rank has stopped after the agreed step, and has saved the state that only it has."""

    type: Literal["rank_stopped"] = "rank_stopped"
    number: Number
    step: Count


class LookUp(Report):
    """A rank requests the addresses of the key-value servers of these ranks."""

    type: Literal["look_up"] = "look_up"
    ranks: Listed[Count]


# --- reports of an agent --------------------------------------------------------------------------


class AgentHandshake(Declared):
    """An agent connects to the coordinator, or votes for another agent as the next coordinator."""

    sender, reader = "agent", "coordinator, agent"
    type: Literal["handshake"] = "handshake"
    node: Number
    id: str
    """Id of this agent's process."""
    pid: Count
    peer: Address
    """Address at which the node's memory server serves other nodes."""
    address: Address
    """Address at which this agent serves other agents."""
    domain: str
    """Failure domain of the node."""
    generation: Count
    moved_in: Count = 0
    """Generation of the last renumbering of ranks that the node's workers have received."""
    workers: ByNumber[RunningWorker]
    committed: Count
    """Newest step that any worker of the node has committed."""
    exited: ByNumber[Number]
    """Exit codes of workers that ended after their training was done."""
    leaving: bool = False
    """Whether the node was ordered to leave the job."""
    clock: MonotonicTime | None = None
    job_state: dict[str, Any] | None
    """The job state, if this agent is one of the few that have it; null if it is not, or if the job has not begun."""
    term: Count = 0
    """Term of the last coordinator that this agent knows; 0 if it knows none."""

    @property
    def knows_job(self) -> bool:
        """Whether this agent's node has already been in the job."""
        return self.job_state is not None or self.term > 0


class AskNumber(Declared):
    """A pod that was placed from outside of the job requests the state of a running job and a node number in it."""

    sender, reader = "agent", "agent"
    type: Literal["ask_number"] = "ask_number"
    wanted: Number
    """Preferred node number."""
    listens: Address | None
    """Address at which the pod's agent will listen. An earlier agent at this address has ended, because its container
    was restarted."""


class FreeNumber(Declared):
    """An agent answers a request for a node number."""

    sender, reader = "agent", "agent"
    type: Literal["free_number"] = "free_number"
    node: Number | None
    """A free node number. Null if this agent is not the coordinator, or if no number is free."""
    knows_job: bool
    """Whether this agent's job has begun."""
    coordinator: Address | None
    """Address of the coordinator; null if this agent does not know it."""
    succeeded: bool = False
    """Whether this agent's job has succeeded."""


class Beat(Report):
    """A heartbeat: the agent is alive."""

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
    """State in each rank's process, if it is the state after one complete step. One entry for all ranks, or one for
    each rank."""
    held: Listed[HeldCommit]
    """Snapshots in the node's memory."""
    pieces: Listed[HeldPiece] = ()
    """Parity pieces in the node's memory."""
    disk: DiskState = DiskState()


class AskJobState(Report):
    """The agent lacks the base of a state change, so it requests the full job state."""

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
    """Error code of the job, if the job ends because of this death."""
    joined: Count = 0
    """Newest generation that the process has requested to join; 0 if none."""


class Exited(Report):
    """The process of a rank has ended after its training was done, or without joining any generation."""

    sender, reader = "agent", "coordinator"
    type: Literal["exited"] = "exited"
    code: Number
    last_line: str = ""
    """Last line of the process's output, if the process failed."""


class Alive(Report):
    """All ranks of the node are alive, in answer to the liveness query."""

    sender, reader = "agent", "coordinator"
    type: Literal["alive"] = "alive"


class Decommissioned(Report):
    """All workers of the node have ended. `held` and `pieces` are the contents of the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["decommissioned"] = "decommissioned"
    held: Listed[HeldSnapshot]
    pieces: Listed[HeldPiece] = ()


class DurableAnswer(Report):
    """The checkpoints in the durable tiers."""

    sender, reader = "agent", "coordinator"
    type: Literal["durable"] = "durable"
    checkpoints: Listed[DurableCheckpoint]
    newest_generation: Count
    problems: Listed[str]
    unreachable: Listed[str]
    """Problems of durable tiers that may hide a newer checkpoint."""
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]] = ()
    """`exclude` of the request. The coordinator ignores answers to earlier requests."""


class Stalled(Report):
    """A rank has made no progress within its time limit."""

    sender, reader = "agent", "coordinator"
    type: Literal["stalled"] = "stalled"
    limit_s: Seconds
    """Time limit that the rank has exceeded."""


class Heartbeats(Report):
    """The heartbeats of the node's ranks, in answer to the hang query."""

    sender, reader = "agent", "coordinator"
    type: Literal["heartbeats"] = "heartbeats"
    heartbeats: Listed[RankHeartbeat]


class ServesPeers(Report):
    """The node has a new memory server with this address."""

    sender, reader = "agent", "coordinator"
    type: Literal["serves_peers"] = "serves_peers"
    peer: Address


class Leave(Report):
    """The node was ordered to leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["leave"] = "leave"


class HoldTraining(Report):
    """Stop all ranks until this node continues. The ranks leave their step, and keep their processes and memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["hold"] = "hold"
    for_fault: bool = False
    """Whether a fault is the reason. Then a job that trains without the lost ranks does not stop."""


class ResumeTraining(Report):
    """This node no longer holds training."""

    sender, reader = "agent", "coordinator"
    type: Literal["resume"] = "resume"
    nodes: Count
    """New number of nodes of an elastic job. The nodes with the lowest numbers stay."""
    gone: Listed[str] = ()
    """Addresses of nodes that were removed from outside of the job and so do not stay."""


class CancelJob(Report):
    """End the job, because this agent received a request to end it."""

    sender, reader = "agent", "coordinator"
    type: Literal["cancel"] = "cancel"


class NodeBroken(Report):
    """The node has failed and must leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["broken"] = "broken"
    cause: str
    code: str
    """Error code of the job, if the job ends because of this node."""
    lost: bool
    """Whether another node can replace this node."""


class LastSnapshots(Report):
    """Training has ended. `held` are the snapshots in the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["last_snapshots"] = "last_snapshots"
    held: Listed[HeldSnapshot]


class Uploaded(Report):
    """The node has uploaded as much of its part of the last step as it could."""

    sender, reader = "agent", "coordinator"
    type: Literal["uploaded"] = "uploaded"


# --- orders to agents -----------------------------------------------------------------------------


class Order(Declared):
    """An order to an agent."""

    sender, reader = "coordinator", "agent"


class Heard(Order):
    """A heartbeat: the coordinator is alive."""

    type: Literal["beat"] = "beat"
    heard: Count
    """Number of events that the coordinator has received from this agent."""


class JobState(Order):
    """The full job state, sent once to the few agents that may become the coordinator."""

    type: Literal["job_state"] = "job_state"
    job_state: dict[str, Any]
    digest: str = ""
    """Digest of this job state, which is the base of the next change."""


class JobStateChange(Order):
    """The changes of the job state since the last message about it."""

    type: Literal["job_state_change"] = "job_state_change"
    number: Count
    """Number of the new job state."""
    before: str
    """Digest of the job state before the changes."""
    digest: str
    """Digest of the new job state."""
    changes: Listed[Annotated[tuple[Any, ...], Strict(False)]]
    """List of changes. A change has a path of keys and a new value; without a value, the key was removed."""


class JobNews(Order):
    """The part of the job state that every agent needs, sent after each change. An agent with a coordinator also sends
    it to agents that vote for it."""

    type: Literal["job_news"] = "job_news"
    term: Count
    coordinator: Number
    """Node of the coordinator."""
    candidates: ByNumber[Address]
    """Addresses of agents with the job state. If the coordinator is lost, one of them replaces it."""
    members: Count
    """Number of members of the job."""
    master_port: Port
    world_size: Count
    nodes: Count
    """Number of nodes with ranks."""
    moved_in: Count
    """Generation of the last renumbering of ranks."""
    spares: bool
    """Whether a spare is connected."""
    servers_lost: Count
    """Number of memory servers lost so far, alone or together with their node."""
    faults: Listed[Annotated[tuple[Count, Count], Strict(False)]] = ()
    """Rank and step of each fault so far, if the job injects faults; else empty."""


class NodeAssignment(Order):
    """The ranks and peers of this node, sent after each change."""

    type: Literal["assignment"] = "assignment"
    ranks: Listed[Count]
    peers: ByNumber[Address]
    """Addresses of the memory servers of this node, of the holders of its replicas, and of its parity group."""
    domains: ByNumber[str]
    """Failure domain of each node in `peers`."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node in this node's parity group; empty without parity."""


class StopNode(Order):
    """Leave the job, because it continues without this node or cannot run on it."""

    type: Literal["stop"] = "stop"
    why: str
    hint: str


class EndJob(Order):
    """The job has ended."""

    type: Literal["end"] = "end"
    state: Literal["succeeded", "failed", "cancelled"]
    grace_s: float
    """Time limit for uploading existing snapshots; negative if none may be uploaded."""
    why: str = ""
    """Reason why the job failed."""
    hint: str = ""


class Released(Order):
    """Leave the job, because it no longer needs this node's memory."""

    type: Literal["released"] = "released"


class StartWorker(Order):
    """Start a process for this rank, and kill the rank's existing process."""

    type: Literal["start_worker"] = "start_worker"
    rank: Count


class PrepareWorker(Order):
    """Start a process for this rank of the next rank assignment, while the present ranks train."""

    type: Literal["prepare_worker"] = "prepare_worker"
    rank: Count
    world_size: Count


class EndWorkers(Order):
    """End the processes that wait for the next rank assignment, because it was cancelled."""

    type: Literal["end_workers"] = "end_workers"


class MembersReleased(Order):
    """Free the memory held for nodes that have left the job."""

    type: Literal["members_released"] = "members_released"
    world_size: Count


class DecommissionNode(Order):
    """End the node's workers, because other nodes now have its ranks, and report the snapshots in its memory."""

    type: Literal["decommission"] = "decommission"


class ScheduleSave(Order):
    """Copy this step to a tier of this kind."""

    type: Literal["schedule_save"] = "schedule_save"
    kind: str
    """`peer`, or the kind of a durable tier."""
    step: Count


class AskDurableTiers(Order):
    """Report the checkpoints in the durable tiers."""

    type: Literal["ask_durable"] = "ask_durable"
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]]
    """URLs and save ids of checkpoints that ranks have refused, to leave out of the answer."""


class AskHeartbeats(Order):
    """Report the heartbeats of all ranks, because a rank makes no progress."""

    type: Literal["ask_heartbeats"] = "ask_heartbeats"


class AskAlive(Order):
    """Report whether all ranks are alive, because a collective broke without a reported death."""

    type: Literal["ask_alive"] = "ask_alive"
    generation: Count


class EndHung(Order):
    """Kill the process of a hung rank."""

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
    """Save id of the snapshot. Empty if no snapshot exists on all ranks: then upload only snapshots that are due
    anyway."""


# --- orders to all ranks of a generation ------------------------------------------------------------


class GenerationOrder(Declared):
    """An order to all agents and their workers in one generation."""

    sender, reader = "coordinator, agent", "agent, worker"

    generation: Count


class BeginGeneration(GenerationOrder):
    """Begin the generation: open the process groups, and restore."""

    type: Literal["begin"] = "begin"
    decision: RestoreDecision
    world_size: Count
    full_size: Count | None = None
    """World size when no rank is missing; null if no rank is missing now."""
    addresses: ByNumber[Address]
    """Addresses of ranks' key-value servers. A small job gets all addresses. A large job gets only addresses that are
    new since generation `follows`, and ranks look up the others."""
    follows: Count
    """Generation to which `addresses` are added; 0 if all earlier addresses are invalid."""
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str
    memory_every: Count | None = None
    """Steps between two snapshots in memory; null for the interval in the spec."""
    peer_step: Count | None = None
    """Next step to copy to peers; null if the interval in the policy applies."""
    rank: Number = -1
    """Rank of the receiving worker, which the worker's agent adds."""


class TryNext(GenerationOrder):
    """Restore from this decision, because a rank could not restore from the earlier one."""

    type: Literal["restore"] = "restore"
    decision: RestoreDecision
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str


class Addresses(GenerationOrder):
    """Use these addresses of ranks' key-value servers, which a rank has looked up."""

    type: Literal["addresses"] = "addresses"
    addresses: ByNumber[Address]


class GoOn(GenerationOrder):
    """Train, because every rank has the state of this step."""

    type: Literal["go"] = "go"
    step: Count


class AbortGeneration(GenerationOrder):
    """Leave the previous generation, and join this generation."""

    type: Literal["abort"] = "abort"
    rank: Number
    """Rank with the fault; -1 if there is no fault."""
    moved: ByNumber[Count] = {}
    """New rank of each process that stays, by its old rank."""
    moved_in: Count = 0
    """Generation of the renumbering in `moved`; 0 if there was none."""
    drop_joining: bool = False
    """Whether to end processes that wait for the next rank assignment."""


class FinishTraining(GenerationOrder):
    """Finish, because all ranks are done."""

    type: Literal["finish"] = "finish"


class AskStop(GenerationOrder):
    """Report whether this rank can stop after this step."""

    type: Literal["ask_stop"] = "ask_stop"
    number: Number
    step: Count
    ends: bool = False
    """Whether processes end at the stop, so that only saved state remains."""


class StopAtStep(GenerationOrder):
    """Stop after the requested step, because all ranks can."""

    type: Literal["stop_at"] = "stop_at"
    number: Number


class WithdrawStop(GenerationOrder):
    """Continue training, because the stop was withdrawn."""

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
