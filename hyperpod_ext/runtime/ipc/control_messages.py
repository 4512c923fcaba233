"""Messages between workers, agents and the coordinator. Each kind is declared once.

    worker ──▶ its agent ──▶ coordinator        reports of a rank; the agent adds the rank's number and other fields
    worker ◀── its agent ◀── coordinator        orders to all ranks of a generation

Each reader has a set of accepted message kinds, with which it decodes a message to an instance of the declared class.
An invalid message is refused with an error that names the invalid field.
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
"""Number of a rank, node or step. A negative number means that the rank, node or step does not exist yet."""
MonotonicTime = Annotated[float, Field(ge=-1e12, le=1e12)]
"""A time on the sender's monotonic clock, in seconds."""
SaveId = Annotated[str, Field(pattern=r"^g\d{1,18}-s\d{1,18}$", examples=["g1-s3", "g7-s120"])]
"""Id of a save, which consists of `g`, the generation, `-s` and the step."""
Shared = Annotated[
    str, Field(pattern=r"^(same|alike|shard)(:\d{1,18}(,\d{1,18})*)?$", examples=["same", "alike:0,2", "shard"])
]
"""Relation between a rank's state and the states of other ranks. `snapshot/sharing.py` documents the values."""


# --- parts of messages ----------------------------------------------------------------------------


class LiveState(Declared):
    """The state of a rank in its running process, as opposed to a snapshot of it."""

    step: Count
    save_id: SaveId
    own_digest: str
    sharing: Shared
    world_size: Count = 0
    """World size for which the state is laid out; 0 if the state is the same on all ranks, and so fits any world
    size."""


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
    """All snapshots in a node's memory that belong to one save (one step of one generation)."""

    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    sharing: Shared
    replica: bool
    """Whether the snapshots are replicas of another node's snapshots."""
    ranks: Listed[Count]
    own_digests: Listed[str]
    """Digests of the part of the state that may differ between ranks. The list has one digest for each of `ranks`, or a
    single digest if they are equal."""
    contents: Listed[str]
    """Digests of the complete state in each snapshot. The list has one digest for each of `ranks`, or a single digest
    if they are equal."""


class OnDisk(Declared, extra="ignore"):
    """A snapshot of one rank on a disk of the node."""

    rank: Count
    step: Count
    save_id: SaveId
    world_size: Count
    own_digest: str
    sharing: Shared
    content: str
    tier: str
    """Kind of the checkpoint tier that uses this disk."""
    url: str
    folder: str
    run: str
    """Name of the run of the job that saved the snapshot."""
    began: Count
    """First step of the generation that saved the snapshot."""


class DiskState(Declared):
    """The snapshots and problems that a node found on its disks."""

    snapshots: Listed[OnDisk] = ()
    generation: Count = 0
    """Newest generation that any disk of the node has a record of; 0 if none."""
    problems: Listed[str] = ()
    """One sentence for each unreadable disk or checkpoint."""


class HeldPiece(Declared, extra="ignore"):
    """A complete parity piece in a node's memory. A parity piece is the XOR of parts of other ranks' snapshots."""

    rank: Count
    """Rank of this node in `stripe`. The piece combines parts of the snapshots of all other ranks in `stripe`."""
    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    stripe: Listed[Count]
    """Ranks, one on each node of a parity group, whose snapshots protect each other by parity."""


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
    """The restore decision (which step to restore, and from where), limited to the sources that one node needs."""

    step: Count
    sources: ByNumber[Listed[RestoreSource]]
    """Maps a rank to its sources. The ranks are the node's own ranks, and ranks on other nodes that receive live state
    from a rank of this node."""
    others: Literal["self", "fresh"] = "self"
    """Source of every rank that is not in `sources`: `self` (the state in the rank's own process) or `fresh` (a start
    at step 0)."""
    save_id: str = ""
    """Save id of the state of every rank that is not in `sources`; empty if these ranks start at step 0."""
    stored: Listed[str] = ()
    """URLs of the durable tiers from which at least one rank restores."""


class RunningWorker(Declared):
    """A worker process that runs on a node."""

    pid: Count
    step: Count
    joining: bool = False
    """Whether the worker was started for the next rank assignment, and waits for it."""


class RankHeartbeat(Declared):
    """The contents of a rank's heartbeat page, which is shared memory that the rank updates as it makes progress."""

    rank: Count
    generation: Count
    step: Number
    phase: Annotated[int, Field(ge=0, le=max(Phase))]
    collectives: Count
    quiet_s: Seconds
    """Time since the rank's last progress."""
    silent_s: Seconds
    """Time since the process last ran Python code."""
    stopped: bool
    """Whether the process is stopped, for example by SIGSTOP or a debugger."""


# --- reports of a rank ----------------------------------------------------------------------------


class Report(Declared):
    """Base class of reports that a rank or an agent sends."""

    sender, reader = "worker, agent", "agent, coordinator"

    generation: Count = 0
    """Current generation of the sender; 0 before its first generation."""
    rank: Number = -1
    """Current rank number of the sending worker, which the worker's agent adds. -1 if the agent itself sends the
    report, or if the agent has not added the number yet."""


class WorkerHandshake(Declared):
    """First message of a worker to its agent. The worker has started, or connects again because its connection
    broke."""

    sender, reader = "worker", "agent"
    type: Literal["handshake"] = "handshake"
    rank: Count
    pid: Count
    generation: Count = 0
    again: bool = False
    """Whether the worker connects again because an earlier connection broke. If `again` is true, the agent answers with
    `resumed`."""
    received: Count = 0
    """Number of orders that the worker has received on earlier connections."""


class WorkerResumed(Declared):
    """The agent accepts a worker that connects again. The worker and the agent then both resend the messages that the
    other has not received."""

    sender, reader = "agent", "worker"
    type: Literal["resumed"] = "resumed"
    received: Count
    """Number of this worker's reports that the agent has received."""


class Join(Report):
    """A rank waits for the next generation."""

    type: Literal["join"] = "join"
    live: LiveState | None
    """State in the process, if it is consistent, that is, exactly the state after some step; null if it is not."""
    store_port: Port
    """Port of the rank's key-value server, at which other ranks meet to create process groups."""
    pid: Count = 0
    """Process id of the rank, which the rank's agent adds."""


class Restored(Report):
    """A rank has restored and verified its state, or has failed to do so."""

    type: Literal["restored"] = "restored"
    attempt: Count
    error: str
    """Error of the restore; empty if the restore succeeded."""
    ranks: Listed[Count] = ()
    """Ranks of the node that have the same result, so that the agent can send one message for them. If `ranks` is
    empty, the result applies only to `rank`."""


class Finished(Report):
    """The training function of a rank has returned."""

    type: Literal["finished"] = "finished"
    digest: str
    """Digest of the rank's state after the last step."""


class Event(Report):
    """An entry for the job's event log."""

    type: Literal["event"] = "event"
    event: str
    t: MonotonicTime
    """Time of the event, on the sender's monotonic clock."""
    fields: dict[str, Any]
    """All other fields of the event."""


class Failed(Report):
    """The training function of a rank has raised an exception."""

    type: Literal["failed"] = "failed"
    cause: str
    step: Number
    final: bool
    """Whether the job must end because a retry would fail in the same way."""
    code: str
    hint: str
    place: str
    """Location of the fault, such as a line of the script. Faults of the same kind at the same location count as
    repetitions."""
    process_unusable: bool = False
    """Whether the process must be replaced although it runs, because its CUDA context is unusable."""
    t: MonotonicTime = 0.0
    """Time at which the rank's agent received the report."""
    kind: FaultKind = "exception"
    """Kind of the fault, which the rank's agent sets."""
    phase: str = ""
    """Phase of the training step in which the exception was raised."""
    joined: Count = 0
    """Generation in which the fault occurred, if the agent is already in a newer generation; otherwise 0."""


class StopAnswer(Report):
    """A rank answers whether it can stop after the requested step."""

    type: Literal["stop_answer"] = "stop_answer"
    number: Number
    """Number of the stop request that is answered."""
    can: bool
    at: Number
    """Step that the rank is computing; -1 if it has not begun its training loop."""
    over: bool
    """Whether the rank makes no more steps, because its training loop has ended."""


class RankStopped(Report):
    """A rank waits after the agreed step, and has saved the state that no other rank has."""

    type: Literal["rank_stopped"] = "rank_stopped"
    number: Number
    step: Count


class LookUp(Report):
    """A rank requests the addresses of the key-value servers of the ranks in `ranks`."""

    type: Literal["look_up"] = "look_up"
    ranks: Listed[Count]


# --- reports of an agent --------------------------------------------------------------------------


class AgentHandshake(Declared):
    """An agent connects to the coordinator, or votes for another agent as the next coordinator."""

    sender, reader = "agent", "coordinator, agent"
    type: Literal["handshake"] = "handshake"
    node: Number
    id: str
    """Random id of this agent's process, which differs after a restart."""
    pid: Count
    peer: Address
    """Address at which memory servers of other nodes reach this node's memory server."""
    address: Address
    """Address at which other agents reach this agent."""
    domain: str
    """Name of the node's failure domain, such as its rack or availability zone."""
    generation: Count
    moved_in: Count = 0
    """Generation in which the node's workers last received new rank numbers."""
    workers: ByNumber[RunningWorker]
    committed: Count
    """Newest step that any worker of the node has committed."""
    exited: ByNumber[Number]
    """Maps the rank of each worker that has ended after its training was done to its exit code."""
    leaving: bool = False
    """Whether this node has been ordered to leave the job."""
    clock: MonotonicTime | None = None
    job_state: dict[str, Any] | None
    """This agent's copy of the job state; null if the agent has no copy, because it is not a candidate for the next
    coordinator or because the job has not begun."""
    term: Count = 0
    """Term of the last coordinator from which this agent received messages; 0 if there was none."""

    @property
    def knows_job(self) -> bool:
        """Whether this agent's node has already been in the job."""
        return self.job_state is not None or self.term > 0


class AskNumber(Declared):
    """The agent of a pod that was added from outside of the job asks another agent for a free node number and whether
    the job has begun."""

    sender, reader = "agent", "agent"
    type: Literal["ask_number"] = "ask_number"
    wanted: Number
    """Node number that the pod would like to have."""
    listens: Address | None
    """Address at which the pod's agent will listen. If the job has an agent with the same address, that agent has
    ended, because its container was restarted."""


class FreeNumber(Declared):
    """An agent answers the request of a pod for a node number."""

    sender, reader = "agent", "agent"
    type: Literal["free_number"] = "free_number"
    node: Number | None
    """A free node number; null if this agent is not the coordinator, or if the job has no free node number."""
    knows_job: bool
    """Whether the job of this agent has begun."""
    coordinator: Address | None
    """Address of the coordinator; null if this agent does not know it."""
    succeeded: bool = False
    """Whether the job of this agent has ended successfully."""


class Beat(Report):
    """An agent's heartbeat, which shows the coordinator that the agent is alive."""

    sender, reader = "agent", "coordinator"
    type: Literal["beat"] = "beat"
    clock: MonotonicTime | None = None


class Acknowledged(Report):
    """The agent has received version `number` of the job state."""

    sender, reader = "agent", "coordinator"
    type: Literal["acknowledged"] = "acknowledged"
    number: Count


class NodeJoin(Report):
    """Some ranks of a node wait for the next generation. This message combines the `join` reports of these ranks."""

    sender, reader = "agent", "coordinator"
    type: Literal["node_join"] = "node_join"
    ranks: Listed[Count]
    pids: Listed[Count]
    """Process id of each rank."""
    store_ports: Listed[Port]
    """Port of each rank's key-value server."""
    lives: Listed[LiveState | None]
    """Consistent state in each rank's process, or null if a process has none. The list has one entry for each of
    `ranks`, or a single entry if they are equal."""
    held: Listed[HeldCommit]
    """Snapshots in the memory of the node."""
    pieces: Listed[HeldPiece] = ()
    """Parity pieces in the memory of the node."""
    disk: DiskState = DiskState()


class AskJobState(Report):
    """The agent requests the full job state, because it lacks the version to which a received change must be
    applied."""

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
    """Error code with which the job fails, if the job ends because of this death."""
    joined: Count = 0
    """Newest generation that the process was waiting to join; 0 if it never joined one."""


class Exited(Report):
    """The process of a rank has ended after its training was done, or before it joined a generation."""

    sender, reader = "agent", "coordinator"
    type: Literal["exited"] = "exited"
    code: Number
    last_line: str = ""
    """Last line of the process's output, if the process failed."""


class Alive(Report):
    """Answer to the liveness query (`ask_alive`): all ranks of the node are alive."""

    sender, reader = "agent", "coordinator"
    type: Literal["alive"] = "alive"


class Decommissioned(Report):
    """All workers of the node have ended, as ordered by `decommission`. `held` and `pieces` list the snapshots and
    parity pieces in the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["decommissioned"] = "decommissioned"
    held: Listed[HeldSnapshot]
    pieces: Listed[HeldPiece] = ()


class DurableAnswer(Report):
    """Answer to `ask_durable`: the checkpoints in the durable tiers."""

    sender, reader = "agent", "coordinator"
    type: Literal["durable"] = "durable"
    checkpoints: Listed[DurableCheckpoint]
    newest_generation: Count
    problems: Listed[str]
    unreachable: Listed[str]
    """One sentence for each durable tier that could not be listed, and so may hold a newer checkpoint."""
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]] = ()
    """The value of `exclude` in the request, by which the coordinator recognises and ignores answers to earlier
    requests."""


class Stalled(Report):
    """The agent has seen no progress of a rank within the rank's time limit."""

    sender, reader = "agent", "coordinator"
    type: Literal["stalled"] = "stalled"
    limit_s: Seconds
    """Time limit that the rank has exceeded."""


class Heartbeats(Report):
    """Answer to the hang query (`ask_heartbeats`): the heartbeats of the node's ranks."""

    sender, reader = "agent", "coordinator"
    type: Literal["heartbeats"] = "heartbeats"
    heartbeats: Listed[RankHeartbeat]


class ServesPeers(Report):
    """The node's memory server was restarted and now has the address `peer`."""

    sender, reader = "agent", "coordinator"
    type: Literal["serves_peers"] = "serves_peers"
    peer: Address


class Leave(Report):
    """The node asks to leave the job, because it has been ordered to."""

    sender, reader = "agent", "coordinator"
    type: Literal["leave"] = "leave"


class HoldTraining(Report):
    """Put training on hold until this node sends `resume`. All ranks of the job abort their step, and keep their
    processes and memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["hold"] = "hold"
    for_fault: bool = False
    """Whether a fault is the reason for the hold. A job that continues without its lost ranks ignores holds with
    `for_fault`."""


class ResumeTraining(Report):
    """This node ends its hold on training."""

    sender, reader = "agent", "coordinator"
    type: Literal["resume"] = "resume"
    nodes: Count
    """Number of nodes with which an elastic job continues. If `gone` is empty, the nodes with the lowest numbers
    stay."""
    gone: Listed[str] = ()
    """Addresses of nodes that were removed from outside of the job."""


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
    """Whether the job may recover by replacing this node. If `lost` is false, the job fails."""


class LastSnapshots(Report):
    """Answer to `save_last`, after training has ended: the snapshots in the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["last_snapshots"] = "last_snapshots"
    held: Listed[HeldSnapshot]


class Uploaded(Report):
    """The node has finished uploading its part of the last step, completely or not."""

    sender, reader = "agent", "coordinator"
    type: Literal["uploaded"] = "uploaded"


# --- orders to agents -----------------------------------------------------------------------------


class Order(Declared):
    """Base class of orders from the coordinator to one agent."""

    sender, reader = "coordinator", "agent"


class Heard(Order):
    """The coordinator's heartbeat, which shows the agent that the coordinator is alive."""

    type: Literal["beat"] = "beat"
    heard: Count
    """Number of events that the coordinator has received from the agent on this connection."""


class JobState(Order):
    """The full job state, which the coordinator sends to an agent that becomes a candidate for the next coordinator or
    that requests the job state."""

    type: Literal["job_state"] = "job_state"
    job_state: dict[str, Any]
    digest: str = ""
    """Digest of this job state. The next `job_state_change` refers to this digest as `before`."""


class JobStateChange(Order):
    """Changes of the job state since the last `job_state` or `job_state_change` message to this agent."""

    type: Literal["job_state_change"] = "job_state_change"
    number: Count
    """Version number of the job state after the changes."""
    before: str
    """Digest of the job state before the changes."""
    digest: str
    """Digest of the job state after the changes."""
    changes: Listed[Annotated[tuple[Any, ...], Strict(False)]]
    """List of changes. Each change is a path of keys with a new value. A path without a value means that the key was
    removed."""


class JobNews(Order):
    """The part of the job state that every agent needs, which the coordinator sends after each change. An agent that is
    connected to a coordinator also sends `job_news` to agents that vote for it."""

    type: Literal["job_news"] = "job_news"
    term: Count
    coordinator: Number
    """Node of the coordinator."""
    candidates: ByNumber[Address]
    """Addresses of the agents that have a copy of the job state. If the coordinator is lost, one of these agents
    replaces it."""
    members: Count
    """Number of nodes of the job, with ranks or as spares."""
    master_port: Port
    world_size: Count
    nodes: Count
    """Number of nodes with ranks."""
    moved_in: Count
    """Generation in which ranks last received new numbers; 0 if they never did."""
    spares: bool
    """Whether at least one spare node is connected."""
    servers_lost: Count
    """Number of memory servers that the job has lost so far, alone or together with their node."""
    faults: Listed[Annotated[tuple[Count, Count], Strict(False)]] = ()
    """Rank and step of each fault so far; empty if the job does not inject faults."""


class NodeAssignment(Order):
    """The ranks of this node and the nodes with which it exchanges copies, which the coordinator sends after each
    change."""

    type: Literal["assignment"] = "assignment"
    ranks: Listed[Count]
    peers: ByNumber[Address]
    """Address of the memory server of each of these nodes: this node, the nodes that hold its replicas, and the nodes
    of its parity group."""
    domains: ByNumber[str]
    """Failure domain of each node in `peers`."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node in this node's parity group; empty without parity."""


class StopNode(Order):
    """Leave the job, because the job continues without this node or cannot use it."""

    type: Literal["stop"] = "stop"
    why: str
    hint: str


class EndJob(Order):
    """End the node's part of the job, because the job has ended."""

    type: Literal["end"] = "end"
    state: Literal["succeeded", "failed", "cancelled"]
    grace_s: float
    """Time limit for uploading existing snapshots, in seconds; negative if no snapshot may be uploaded."""
    why: str = ""
    """Reason why the job failed."""
    hint: str = ""


class Released(Order):
    """Leave the job, because it no longer needs this node's memory."""

    type: Literal["released"] = "released"


class StartWorker(Order):
    """Kill the existing process of this rank, and start a new one."""

    type: Literal["start_worker"] = "start_worker"
    rank: Count


class PrepareWorker(Order):
    """Start a process for this rank of the next rank assignment, while the ranks of the current assignment train."""

    type: Literal["prepare_worker"] = "prepare_worker"
    rank: Count
    world_size: Count


class EndWorkers(Order):
    """End the processes that wait for the next rank assignment, because that assignment was cancelled."""

    type: Literal["end_workers"] = "end_workers"


class MembersReleased(Order):
    """Free the memory that holds snapshots of nodes that have left the job."""

    type: Literal["members_released"] = "members_released"
    world_size: Count


class DecommissionNode(Order):
    """End the node's workers, because its ranks have moved to other nodes, and report the snapshots in its memory."""

    type: Literal["decommission"] = "decommission"


class ScheduleSave(Order):
    """Copy the node's snapshots of step `step` to the tier of kind `kind`."""

    type: Literal["schedule_save"] = "schedule_save"
    kind: str
    """Kind of the tier: `peer`, or the kind of a durable tier."""
    step: Count


class AskDurableTiers(Order):
    """Report the checkpoints in the durable tiers."""

    type: Literal["ask_durable"] = "ask_durable"
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]]
    """URL and save id of each checkpoint to leave out of the answer, because ranks could not restore it."""


class AskHeartbeats(Order):
    """Hang query: report the heartbeats of all ranks of the node, because some rank of the job makes no progress."""

    type: Literal["ask_heartbeats"] = "ask_heartbeats"


class AskAlive(Order):
    """Liveness query: report whether all ranks of the node are alive, because a collective failed although no death was
    reported."""

    type: Literal["ask_alive"] = "ask_alive"
    generation: Count


class EndHung(Order):
    """Kill the process of a hung rank."""

    type: Literal["end_hung"] = "end_hung"
    rank: Count
    cause: str


class SaveLast(Order):
    """End the workers, because training is done on all ranks, and report the snapshots in the node's memory."""

    type: Literal["save_last"] = "save_last"


class UploadSnapshot(Order):
    """Upload the node's part of the snapshot with save id `save_id`."""

    type: Literal["upload_snapshot"] = "upload_snapshot"
    save_id: str
    """Save id of the snapshot; empty if no save is complete on all ranks. If `save_id` is empty, upload only the
    snapshots whose upload is due anyway."""


# --- orders to all ranks of a generation ------------------------------------------------------------


class GenerationOrder(Declared):
    """Base class of orders to all agents and their workers in one generation."""

    sender, reader = "coordinator, agent", "agent, worker"

    generation: Count


class BeginGeneration(GenerationOrder):
    """Begin the generation: create the process groups, then restore the state."""

    type: Literal["begin"] = "begin"
    decision: RestoreDecision
    world_size: Count
    full_size: Count | None = None
    """World size that the job has when no rank is missing; null if no rank is missing now."""
    addresses: ByNumber[Address]
    """Address of each rank's own key-value server, by rank. In a small job, `addresses` has all addresses. In a large
    job, `addresses` has only addresses that are new since generation `follows`, and ranks request other addresses with
    `look_up`."""
    follows: Count
    """Generation whose addresses stay valid and are extended by `addresses`; 0 if all earlier addresses are invalid."""
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str
    memory_every: Count | None = None
    """Number of steps between two snapshots in memory; null if the interval in the spec applies."""
    peer_step: Count | None = None
    """Next step whose snapshots are copied to peer nodes; null if the interval in the checkpoint policy applies."""
    rank: Number = -1
    """Rank of the receiving worker, which the worker's agent adds."""


class TryNext(GenerationOrder):
    """Restore according to a new decision, because a rank could not restore according to the previous decision."""

    type: Literal["restore"] = "restore"
    decision: RestoreDecision
    peers: ByNumber[Address]
    """Memory servers from which the node's ranks restore."""
    run: str


class Addresses(GenerationOrder):
    """Answer to `look_up`: addresses of the key-value servers of the requested ranks."""

    type: Literal["addresses"] = "addresses"
    addresses: ByNumber[Address]


class GoOn(GenerationOrder):
    """Start training, because every rank has restored the state of this step."""

    type: Literal["go"] = "go"
    step: Count


class AbortGeneration(GenerationOrder):
    """Leave the current generation, and join generation `generation`."""

    type: Literal["abort"] = "abort"
    rank: Number
    """Rank whose fault ended the previous generation; -1 if no fault did."""
    moved: ByNumber[Count] = {}
    """Maps the old rank of each process that stays to its new rank; empty if ranks keep their numbers."""
    moved_in: Count = 0
    """Generation from which the new rank numbers of `moved` apply; 0 if ranks keep their numbers."""
    drop_joining: bool = False
    """Whether to end the processes that wait for the next rank assignment."""


class FinishTraining(GenerationOrder):
    """Finish training, because the training function has returned on all ranks."""

    type: Literal["finish"] = "finish"


class AskStop(GenerationOrder):
    """Report whether this rank can stop after step `step`."""

    type: Literal["ask_stop"] = "ask_stop"
    number: Number
    step: Count
    ends: bool = False
    """Whether the processes end after the stop, so that only saved state remains."""


class StopAtStep(GenerationOrder):
    """Stop after the step of stop request `number`, because all ranks can stop there."""

    type: Literal["stop_at"] = "stop_at"
    number: Number


class WithdrawStop(GenerationOrder):
    """Continue training, because stop request `number` was withdrawn."""

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
