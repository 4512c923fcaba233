"""Messages between workers, agents and the coordinator, each declared once.

    worker ──▶ its agent ──▶ coordinator        what a rank reports; its agent adds the rank's number and what it knows
    worker ◀── its agent ◀── coordinator        what all ranks of a generation are to do

A reader decodes with the set of kinds that it takes, and matches on the class. What is damaged is refused by name.
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
"""A number that may be below 0: a rank or a node that is none, a step that has not begun."""
MonotonicTime = Annotated[float, Field(ge=-1e12, le=1e12)]
"""Seconds of the sender's monotonic clock."""
SaveId = Annotated[str, Field(pattern=r"^g\d{1,18}-s\d{1,18}$", examples=["g1-s3", "g7-s120"])]
"""Names a snapshot: its generation and step."""
Shared = Annotated[
    str, Field(pattern=r"^(same|alike|shard)(:\d{1,18}(,\d{1,18})*)?$", examples=["same", "alike:0,2", "shard"])
]
"""How a rank's state relates to the others'; see `snapshot/sharing.py`."""


# --- parts of messages ----------------------------------------------------------------------------


class LiveState(Declared):
    """The state of a process that has trained."""

    step: Count
    save_id: SaveId
    own_digest: str
    sharing: Shared
    world_size: Count = 0
    """Ranks that it is laid out for; 0: any number will do, as it is the same on all."""


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
    """Whether it is the copy of another node's."""


class HeldCommit(Declared):
    """Snapshots of one commit in a node's memory."""

    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    sharing: Shared
    replica: bool
    """Whether they are copies of another node's."""
    ranks: Listed[Count]
    own_digests: Listed[str]
    """One for all of the ranks, or one for each."""
    contents: Listed[str]
    """One for all of the ranks, or one for each."""


class OnDisk(Declared, extra="ignore"):
    """One rank's snapshot on a disk of the node."""

    rank: Count
    step: Count
    save_id: SaveId
    world_size: Count
    own_digest: str
    sharing: Shared
    content: str
    tier: str
    """The tier's kind."""
    url: str
    folder: str
    run: str
    """The run of the job that saved it."""
    began: Count
    """Step at which its generation began."""


class DiskState(Declared):
    """What the disks of a node have."""

    snapshots: Listed[OnDisk] = ()
    generation: Count = 0
    """The newest that any of them has seen."""
    problems: Listed[str] = ()
    """What cannot be read there."""


class HeldPiece(Declared, extra="ignore"):
    """One whole parity piece in a node's memory."""

    rank: Count
    """The node's own in the stripe: the piece has parts of all others."""
    step: Count
    generation: Count
    save_id: SaveId
    world_size: Count
    stripe: Listed[Count]
    """Ranks whose images protect each other."""


class DurableCheckpoint(Declared, extra="ignore"):
    """One checkpoint in a durable tier."""

    tier: str
    """The tier's kind."""
    step: Count
    save_id: SaveId
    world_size: Count
    url: str
    folder: str


class RestoreSource(Declared):
    """Where a rank gets its state."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    rank: Count
    save_id: str
    node: Number
    url: str
    folder: str
    tier: str = ""
    """Kind of the durable tier."""


class RestoreDecision(Declared):
    """What ranks restore, as far as one node's ranks need to know."""

    step: Count
    sources: ByNumber[Listed[RestoreSource]]
    """Of its ranks, and of those that one of its ranks sends its live state to."""
    others: Literal["self", "fresh"] = "self"
    """What ranks do that have no source: they hold it already, or start from nothing."""
    save_id: str = ""
    """Of what they hold."""
    stored: Listed[str] = ()
    """URLs of durable tiers that any rank restores from."""


class RunningWorker(Declared):
    """One worker process of a node."""

    pid: Count
    step: Count
    joining: bool = False
    """Whether it waits for the next rank assignment."""


class RankHeartbeat(Declared):
    """What an agent sees of a rank's heartbeat page."""

    rank: Count
    generation: Count
    step: Number
    phase: Annotated[int, Field(ge=0, le=max(Phase))]
    collectives: Count
    quiet_s: Seconds
    silent_s: Seconds
    stopped: bool


# --- what a rank reports --------------------------------------------------------------------------


class Report(Declared):
    """Of a rank or a node, in a generation."""

    sender, reader = "worker, agent", "agent, coordinator"

    generation: Count = 0
    """Generation of the sender; 0 before its first."""
    rank: Number = -1
    """Its number now, which its agent adds; -1: the agent's own, or not known yet."""


class WorkerHandshake(Declared):
    """A worker has been started, or its former connection has broken."""

    sender, reader = "worker", "agent"
    type: Literal["handshake"] = "handshake"
    rank: Count
    pid: Count
    generation: Count = 0
    again: bool = False
    """Whether a former connection has broken, so that the answer is to say what the agent has received."""
    received: Count = 0
    """Orders that it has received on its former connections."""


class WorkerResumed(Declared):
    """The answer to a worker that connects again: both ends send again what the other has not received."""

    sender, reader = "agent", "worker"
    type: Literal["resumed"] = "resumed"
    received: Count
    """Reports of this worker that the agent has received."""


class Join(Report):
    """A rank waits for a generation to begin."""

    type: Literal["join"] = "join"
    live: LiveState | None
    """What it has, if that is one complete step."""
    store_port: Port
    """Where it serves its keys."""
    pid: Count = 0
    """Its process; its agent adds it."""


class Restored(Report):
    """A rank has restored and verified what was decided, or could not."""

    type: Literal["restored"] = "restored"
    attempt: Count
    error: str
    """Empty: it has."""
    ranks: Listed[Count] = ()
    """All ranks of the node that say the same; none: one alone."""


class Finished(Report):
    """The training function has returned."""

    type: Literal["finished"] = "finished"
    digest: str
    """Of the final state."""


class Event(Report):
    """An entry for the event log."""

    type: Literal["event"] = "event"
    event: str
    t: MonotonicTime
    """When it was."""
    fields: dict[str, Any]
    """What else there is to say."""


class Failed(Report):
    """The training function has raised."""

    type: Literal["failed"] = "failed"
    cause: str
    step: Number
    final: bool
    """Whether trying again cannot help."""
    code: str
    hint: str
    place: str
    """What the same fault has in common with this one when it comes again."""
    process_unusable: bool = False
    """Whether the process must be replaced, though it lives: its CUDA context is unusable."""
    t: MonotonicTime = 0.0
    """When its agent heard of it."""
    kind: FaultKind = "exception"
    """As its agent sees it."""
    phase: str = ""
    """Of its step."""
    joined: Count = 0
    """The generation that it has raised in, where its agent has heard of a newer one meanwhile; else 0."""


class StopAnswer(Report):
    """Answer to a request to stop: whether the rank can stop at that step."""

    type: Literal["stop_answer"] = "stop_answer"
    number: Number
    """Of the question."""
    can: bool
    at: Number
    """Step that it makes; -1: none yet."""
    over: bool
    """It makes no more steps."""


class RankStopped(Report):
    """A rank has stopped at the step that was agreed on, and has saved what only it holds."""

    type: Literal["rank_stopped"] = "rank_stopped"
    number: Number
    step: Count


class LookUp(Report):
    """Where do these ranks serve their keys?"""

    type: Literal["look_up"] = "look_up"
    ranks: Listed[Count]


# --- what an agent reports ------------------------------------------------------------------------


class AgentHandshake(Declared):
    """An agent reaches a coordinator, or votes for the agent that is to become it."""

    sender, reader = "agent", "coordinator, agent"
    type: Literal["handshake"] = "handshake"
    node: Number
    id: str
    """Of this agent's process."""
    pid: Count
    peer: Address
    """Where its memory server serves other nodes."""
    address: Address
    """Where other agents reach it."""
    domain: str
    """What fails together with it."""
    generation: Count
    moved_in: Count = 0
    """Generation in which ranks last got other numbers, as far as its workers go by them."""
    workers: ByNumber[RunningWorker]
    committed: Count
    """Newest step that any of them has committed."""
    exited: ByNumber[Number]
    """Exit codes of those that ended when their training was done."""
    leaving: bool = False
    """Whether the node is to leave."""
    clock: MonotonicTime | None = None
    job_state: dict[str, Any] | None
    """The job state, if it is one of the few that have it; null: it is not, or the job has not begun."""
    term: Count = 0
    """Of the coordinator that it heard last; 0: none yet."""

    @property
    def knows_job(self) -> bool:
        """Whether it has been a node of this job."""
        return self.job_state is not None or self.term > 0


class AskNumber(Declared):
    """A pod got its place from somebody outside of the job: is there a job already, and which node may it be there?"""

    sender, reader = "agent", "agent"
    type: Literal["ask_number"] = "ask_number"
    wanted: Number
    """Number that it takes if nobody has it."""
    listens: Address | None
    """Where its agent is to listen. An agent of the job that was reached there is gone: its container started again."""


class FreeNumber(Declared):
    """Answers that."""

    sender, reader = "agent", "agent"
    type: Literal["free_number"] = "free_number"
    node: Number | None
    """Number that nobody has; null: the agent that was asked does not coordinate, or all of them are taken."""
    knows_job: bool
    """Whether it is in a job that has begun."""
    coordinator: Address | None
    """Who coordinates that, as far as it knows."""
    succeeded: bool = False
    """Whether the job that it was in has come to its end."""


class Beat(Report):
    """The agent is there."""

    sender, reader = "agent", "coordinator"
    type: Literal["beat"] = "beat"
    clock: MonotonicTime | None = None


class Acknowledged(Report):
    """The agent has the job state."""

    sender, reader = "agent", "coordinator"
    type: Literal["acknowledged"] = "acknowledged"
    number: Count


class NodeJoin(Report):
    """Ranks of a node wait for a generation to begin."""

    sender, reader = "agent", "coordinator"
    type: Literal["node_join"] = "node_join"
    ranks: Listed[Count]
    pids: Listed[Count]
    """Process of each."""
    store_ports: Listed[Port]
    """Where each serves its keys."""
    lives: Listed[LiveState | None]
    """What each has, if that is one complete step; one for all, or one for each."""
    held: Listed[HeldCommit]
    """What the node's memory has."""
    pieces: Listed[HeldPiece] = ()
    """Parity that it keeps of other nodes' snapshots."""
    disk: DiskState = DiskState()


class AskJobState(Report):
    """The agent needs the job state whole: it has not what a change was made to."""

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
    """Of the error that ends the job with it."""
    joined: Count = 0
    """The newest generation that this process has asked to join; 0: none."""


class Exited(Report):
    """The process of a rank has ended when its training was done, or without joining any generation."""

    sender, reader = "agent", "coordinator"
    type: Literal["exited"] = "exited"
    code: Number
    last_line: str = ""
    """Last line that it wrote, where it did not end well."""


class Alive(Report):
    """All ranks of the node live: the answer to the liveness query."""

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
    """Those of the problems that leave open whether a tier has a newer one."""
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]] = ()
    """As they were asked: what else there is. An answer to another question is none."""


class Stalled(Report):
    """A rank makes no progress."""

    sender, reader = "agent", "coordinator"
    type: Literal["stalled"] = "stalled"
    limit_s: Seconds
    """Longer than that."""


class Heartbeats(Report):
    """What the agent sees of its ranks: the answer to the hang query."""

    sender, reader = "agent", "coordinator"
    type: Literal["heartbeats"] = "heartbeats"
    heartbeats: Listed[RankHeartbeat]


class ServesPeers(Report):
    """The node's memory server is another one."""

    sender, reader = "agent", "coordinator"
    type: Literal["serves_peers"] = "serves_peers"
    peer: Address


class Leave(Report):
    """The node is to leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["leave"] = "leave"


class HoldTraining(Report):
    """Stop all ranks until this node continues. They leave their step and keep processes and memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["hold"] = "hold"
    for_fault: bool = False
    """Whether that is for a fault. In a job that goes on without what was lost, nobody stops for it then."""


class ResumeTraining(Report):
    """This node has no reason any more to keep ranks from training."""

    sender, reader = "agent", "coordinator"
    type: Literal["resume"] = "resume"
    nodes: Count
    """Nodes that the job is to have from now on, where it may have several numbers; the first ones stay."""
    gone: Listed[str] = ()
    """Addresses of nodes that are none of them any more, as somebody outside of the job has said: they do not stay."""


class CancelJob(Report):
    """Somebody has asked this agent to end the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["cancel"] = "cancel"


class NodeBroken(Report):
    """The node has failed and must leave the job."""

    sender, reader = "agent", "coordinator"
    type: Literal["broken"] = "broken"
    cause: str
    code: str
    """Of the error that ends the job with it."""
    lost: bool
    """Whether another node can take its place."""


class LastSnapshots(Report):
    """Training has ended; these snapshots are in the node's memory."""

    sender, reader = "agent", "coordinator"
    type: Literal["last_snapshots"] = "last_snapshots"
    held: Listed[HeldSnapshot]


class Uploaded(Report):
    """What the node can upload of the last step is uploaded."""

    sender, reader = "agent", "coordinator"
    type: Literal["uploaded"] = "uploaded"


# --- orders to agents -----------------------------------------------------------------------------


class Order(Declared):
    """To an agent."""

    sender, reader = "coordinator", "agent"


class Heard(Order):
    """The coordinator is there."""

    type: Literal["beat"] = "beat"
    heard: Count
    """Events that it has taken from this agent."""


class JobState(Order):
    """What another coordinator needs to go on: once, to the few agents that may have to become it."""

    type: Literal["job_state"] = "job_state"
    job_state: dict[str, Any]
    digest: str = ""
    """What the next change is made to."""


class JobStateChange(Order):
    """What has changed of the job state since the last message with it."""

    type: Literal["job_state_change"] = "job_state_change"
    number: Count
    """Of the job state that this makes."""
    before: str
    """Digest of the job state that it is made to."""
    digest: str
    """Of the one that it makes."""
    changes: Listed[Annotated[tuple[Any, ...], Strict(False)]]
    """Of each: a path of keys, and the value that is there now; without a value, the key is gone."""


class JobNews(Order):
    """What every agent must know of the job, after each change of it. An agent that has a coordinator tells it, too, to
    one that wants it to coordinate."""

    type: Literal["job_news"] = "job_news"
    term: Count
    coordinator: Number
    """Node of the coordinator."""
    candidates: ByNumber[Address]
    """Agents that have the job state: one of them coordinates when this coordinator is lost."""
    members: Count
    """How many there are."""
    master_port: Port
    world_size: Count
    nodes: Count
    """Nodes that have ranks."""
    moved_in: Count
    """Generation in which ranks last got other numbers."""
    spares: bool
    """Whether a node waits without ranks."""
    servers_lost: Count
    """Memory servers that were lost so far, with their node or alone."""
    faults: Listed[Annotated[tuple[Count, Count], Strict(False)]] = ()
    """Rank and step of each fault, where faults are rehearsed."""


class NodeAssignment(Order):
    """What this node has, after each change of it."""

    type: Literal["assignment"] = "assignment"
    ranks: Listed[Count]
    peers: ByNumber[Address]
    """Memory servers of this node, and of those that hold its copies, or keep parity with it."""
    domains: ByNumber[str]
    """What fails together with each of these nodes."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node that keeps parity with it, its own too; none: there is no parity."""


class StopNode(Order):
    """The job goes on without this node, or cannot go on here."""

    type: Literal["stop"] = "stop"
    why: str
    hint: str


class EndJob(Order):
    """The job has ended."""

    type: Literal["end"] = "end"
    state: Literal["succeeded", "failed", "cancelled"]
    grace_s: float
    """How long what there is may take to be uploaded; below 0: no longer."""
    why: str = ""
    """Why it has failed."""
    hint: str = ""


class Released(Order):
    """The job needs nothing of this node any more."""

    type: Literal["released"] = "released"


class StartWorker(Order):
    """Start a process for this rank; end the one that is there."""

    type: Literal["start_worker"] = "start_worker"
    rank: Count


class PrepareWorker(Order):
    """Start a process for this rank of the next rank assignment, while the others train."""

    type: Literal["prepare_worker"] = "prepare_worker"
    rank: Count
    world_size: Count


class EndWorkers(Order):
    """End the processes here that wait for the next rank assignment: it has come to nothing."""

    type: Literal["end_workers"] = "end_workers"


class MembersReleased(Order):
    """Nodes have left, and what the others held for them is not needed any more."""

    type: Literal["members_released"] = "members_released"
    world_size: Count


class DecommissionNode(Order):
    """The node's ranks are elsewhere: end its workers, and report what its memory holds."""

    type: Literal["decommission"] = "decommission"


class ScheduleSave(Order):
    """This step goes to this tier next."""

    type: Literal["schedule_save"] = "schedule_save"
    kind: str
    """`peer`, or the kind of a durable tier."""
    step: Count


class AskDurableTiers(Order):
    """What do the durable tiers hold?"""

    type: Literal["ask_durable"] = "ask_durable"
    exclude: Listed[Annotated[tuple[str, str], Strict(False)]]
    """URL and save id of checkpoints that were refused."""


class AskHeartbeats(Order):
    """What do ranks do? Some rank makes no progress."""

    type: Literal["ask_heartbeats"] = "ask_heartbeats"


class AskAlive(Order):
    """Do all ranks live? A collective broke, and nobody has died."""

    type: Literal["ask_alive"] = "ask_alive"
    generation: Count


class EndHung(Order):
    """End the process of a rank that hangs."""

    type: Literal["end_hung"] = "end_hung"
    rank: Count
    cause: str


class SaveLast(Order):
    """All ranks are done: end their processes, and report what the node's memory holds."""

    type: Literal["save_last"] = "save_last"


class UploadSnapshot(Order):
    """Upload the node's part of this snapshot."""

    type: Literal["upload_snapshot"] = "upload_snapshot"
    save_id: str
    """Empty: no snapshot is there that all ranks have; only what is due already."""


# --- orders to all ranks of a generation ------------------------------------------------------------


class GenerationOrder(Declared):
    """To all agents, for their workers."""

    sender, reader = "coordinator, agent", "agent, worker"

    generation: Count


class BeginGeneration(GenerationOrder):
    """Open process groups, and restore."""

    type: Literal["begin"] = "begin"
    decision: RestoreDecision
    world_size: Count
    full_size: Count | None = None
    """Ranks that there are when none is missing; null: none is."""
    addresses: ByNumber[Address]
    """Where ranks serve their keys: in a small world all of them, in a large one those that are new since the one
    that it follows. Others are looked up."""
    follows: Count
    """The generation that `addresses` add to; 0: what was known before counts no more."""
    peers: ByNumber[Address]
    """Memory servers that the node's ranks restore from."""
    run: str
    memory_every: Count | None = None
    """Steps between two snapshots in memory; null: as the spec says."""
    peer_step: Count | None = None
    """The step that copies on peers are of next; null: none is named."""
    rank: Number = -1
    """Number of the worker that is told; its agent adds it."""


class TryNext(GenerationOrder):
    """Restore this instead: some rank could not restore the earlier decision."""

    type: Literal["restore"] = "restore"
    decision: RestoreDecision
    peers: ByNumber[Address]
    """Memory servers that the node's ranks restore from."""
    run: str


class Addresses(GenerationOrder):
    """Where ranks serve their keys: the answer to a look-up."""

    type: Literal["addresses"] = "addresses"
    addresses: ByNumber[Address]


class GoOn(GenerationOrder):
    """Every rank has the state of this step: train."""

    type: Literal["go"] = "go"
    step: Count


class AbortGeneration(GenerationOrder):
    """Leave the generation before this one, and join this one."""

    type: Literal["abort"] = "abort"
    rank: Number
    """Whose fault it is; -1: nobody's."""
    moved: ByNumber[Count] = {}
    """New number of each rank whose process stays."""
    moved_in: Count = 0
    """Generation in which they got it; 0: all have theirs still."""
    drop_joining: bool = False
    """Whether processes that wait for the next rank assignment are to be ended."""


class FinishTraining(GenerationOrder):
    """All ranks are done."""

    type: Literal["finish"] = "finish"


class AskStop(GenerationOrder):
    """Can this rank stop after that step?"""

    type: Literal["ask_stop"] = "ask_stop"
    number: Number
    step: Count
    ends: bool = False
    """Whether processes end there, so that only what is saved survives it."""


class StopAtStep(GenerationOrder):
    """All ranks can stop there: stop."""

    type: Literal["stop_at"] = "stop_at"
    number: Number


class WithdrawStop(GenerationOrder):
    """Nobody needs to stop any more."""

    type: Literal["withdraw_stop"] = "withdraw_stop"
    number: Number


# --- who takes what -------------------------------------------------------------------------------

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
