"""Requests of workers, agents and scripts to their node's memory server, over its Unix socket, and the answers.

The first request on a connection contains the version of the protocol (`with_version`).
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from hyperpod_ext.runtime.ipc.declared import (
    Address,
    ByNumber,
    Bytes,
    Count,
    Declared,
    Kinds,
    Listed,
    Port,
    Seconds,
    Unit,
)
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request

SERVER_START_S = 120.0
"""Time limit for the start of a server, in seconds. A server's imports take long from a shared file system, or on busy
cores."""
Start = Annotated[int, Field(ge=-1, lt=1 << 63)]
"""Step after which a generation begins; -1 if it begins before step 0."""
WhenBusy = Literal["wait", "skip", "supersede"]
CheckpointId = Annotated[tuple[str, str], Strict(False)]
"""URL of a durable tier, and a save id in that tier."""

# --- saves of a worker --------------------------------------------------------------------------


class Mapped(Declared):
    """A rank's snapshot slots. A file descriptor of the slots' memory comes with this message, unless `slots` is 0."""

    slots: Count
    slot_bytes: Bytes = 0
    """Size of each slot."""


class Map(Request[Mapped]):
    """Return a rank's snapshot slots (places for one snapshot each) in shared memory."""

    sender = "worker"
    op: Literal["map"] = "map"
    owner: Count
    """Rank that owns the slots."""
    slot_bytes: Bytes
    """Minimum size of each slot; 0 to get only slots that an earlier process of the rank has left."""


class AddPlan(Request[Done]):
    """Store a new layout (plan) of a rank's state."""

    sender = "worker"
    op: Literal["add_plan"] = "add_plan"
    digest: str
    document: dict[str, Any]
    """The layout, whose digest is `digest`."""


class FreeSlot(Declared):
    next_slot: Count | None
    """Index of the slot to write; null if the rank must skip this save."""


class NextSlot(Request[FreeSlot]):
    """Return the slot for a rank's next save. A rank does not send this request if the answer to its last `seal`
    request already contained a slot."""

    sender = "worker"
    op: Literal["next_slot"] = "next_slot"
    owner: Count
    """Rank that will save."""
    when_busy: WhenBusy
    """What to do while all slots are in use: wait for a slot, skip the save, or cancel a copy."""


class Begin(Request[Done]):
    """Allow a rank to write to a slot. The rank does not wait for the answer."""

    sender = "worker"
    op: Literal["begin"] = "begin"
    owner: Count
    """Rank that writes."""
    slot: Count
    step: Count
    save_id: str
    generation: Count


class Stepped(Request[Done]):
    """Record that a rank has made a step without a save. This request has no answer."""

    sender = "worker"
    op: Literal["stepped"] = "stepped"
    owner: Count
    """Rank that has made the step."""


class SaveRecord(Declared):
    """A rank's description of its snapshot."""

    save_id: str
    world_size: Count
    own_digest: str
    """Digest of the state that only this rank has."""
    plan: str
    """Digest of the snapshot's layout."""
    nbytes: Bytes
    """Size of the snapshot."""
    values: list[Any]
    """Plain values (not tensors) in the state, in the order of the layout."""
    extras: dict[str, Any]
    saved_at: Annotated[float, Unit("Unix s")]
    checked: Annotated[tuple[Bytes, str], Strict(False)] | None = None
    """Number of bytes from the snapshot's start whose CRC64-NVME the rank has already computed, and this checksum; null
    if it has computed none."""
    provisional: bool = False
    """Whether the snapshot may be copied to other tiers only after a `resolve` request has confirmed it."""


class Sealed(Declared):
    crc64nvme: str
    next_slot: Count | None
    """Index of the slot for the rank's next save; null if no slot is free yet."""


class Seal(Request[Sealed]):
    """Compute the checksum of a written slot, and mark the slot's snapshot as complete (sealed). The rank does not wait
    for the answer."""

    sender = "worker"
    op: Literal["seal"] = "seal"
    owner: Count
    """Rank that has written the slot."""
    slot: Count
    record: SaveRecord


class Resolve(Request[Done]):
    """Confirm or drop a provisional snapshot. The rank does not wait for the answer."""

    sender = "worker"
    op: Literal["resolve"] = "resolve"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str
    keep: bool
    """Whether the snapshot is consistent and must be kept; false to drop the snapshot."""


# --- restores -----------------------------------------------------------------------------------


class Image(Declared):
    """A snapshot. A file descriptor of the memory that contains the snapshot's bytes comes with this message."""

    manifest: dict[str, Any]
    plan: dict[str, Any] | None
    """The snapshot's layout; null if the layout's digest is the request's `known_plan`."""
    offset: Bytes
    bound: bool = True
    """Whether MACs prove that the job wrote the snapshot's bytes; false if the snapshot's checkpoint has no MACs."""


class Open(Request[Image]):
    """Return a snapshot in this node's memory."""

    sender = "worker"
    op: Literal["open"] = "open"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str
    known_plan: str = ""
    """Digest of a layout that the sender already has and that the server need not send; empty if none."""


class Fetch(Request[Image]):
    """Read a rank's snapshot from a durable tier into this node's memory, and return the snapshot."""

    sender = "worker"
    op: Literal["fetch"] = "fetch"
    url: str
    folder: str
    rank: Count


class ImageHead(Declared):
    """The description of a snapshot in a durable tier, without the snapshot's bytes."""

    manifest: dict[str, Any]
    plan: dict[str, Any]
    """The layout."""
    bound: bool = True
    """Whether MACs prove that the job wrote the snapshot's bytes; false if the snapshot's checkpoint has no MACs."""


class FetchHead(Request[ImageHead]):
    """Return the description of a snapshot in a durable tier, so that a rank can choose which parts to read."""

    sender = "worker"
    op: Literal["fetch_head"] = "fetch_head"
    url: str
    folder: str
    rank: Count


class Snapshots(Declared):
    snapshots: Listed[dict[str, Any]]
    """Fields of each complete snapshot: rank, world_size, step, save_id, nbytes, crc64nvme, plan, own_digest, saved_at,
    generation, content, sharing, state, and whether it is a replica of another node's rank."""
    pieces: Listed[dict[str, Any]] = ()
    """Fields of each complete parity piece: rank (rank of this node under which the piece is stored), world_size, step,
    save_id, generation, nbytes, and stripe (the ranks that share the parity)."""
    disk: dict[str, Any] = {}
    """Contents of the node's disks: snapshots, newest generation and problems; see `DiskState`."""


class Held(Request[Snapshots]):
    """List the snapshots in this node's memory: snapshots of this node's ranks, and replicas of other nodes' ranks."""

    sender = "agent, rank 0 of a node"
    op: Literal["held"] = "held"
    owner: Count | None = None
    """If set, the server answers only after it has handled all requests of this rank's earlier processes."""
    pid: Count = 0
    """Process id of the current process of rank `owner`. The server does not wait for requests of this process."""


class DurableCheckpoints(Declared):
    checkpoints: Listed[dict[str, Any]]
    """Fields of each checkpoint: step, generation, save_id, world_size, tier, url, folder."""
    generation: Count
    """Newest generation that is recorded in any durable tier."""
    problems: Listed[str]
    unreachable: Listed[str]
    """Problems of durable tiers that may hide a newer checkpoint."""


class Durable(Request[DurableCheckpoints]):
    """List the newest checkpoints in durable tiers. This request is sent at the start of a run, and later if the
    snapshots in memory are not enough for a restore."""

    sender = "agent, rank 0 of a node"
    op: Literal["durable"] = "durable"
    exclude: Listed[CheckpointId] = ()
    """Checkpoints to leave out of the answer, because ranks have refused to restore them."""


# --- generations, nodes and ranks ---------------------------------------------------------------


class Fence(Request[Done]):
    """Begin a new generation of the job, and refuse writes from processes of earlier generations."""

    sender = "agent, rank 0 of a node"
    op: Literal["fence"] = "fence"
    generation: Count
    step: Start | None = None
    """Step after which the generation begins, and after which snapshots of earlier generations are dropped. Null if the
    step is not decided yet, so that no snapshot is dropped."""
    run: str = ""
    """Name of this run, which distinguishes it from other runs of jobs with the same name."""
    stored: Listed[str] = ()
    """URLs of the durable tiers that already have `step`."""
    again: bool = True
    """Whether the generation saves `step` again, which cancels the upload of an earlier snapshot of `step`."""


class Enter(Request[Done]):
    """Begin a new generation on a node without our agent. The node's ranks may differ from the previous run."""

    sender = "rank 0 of a node"
    op: Literal["enter"] = "enter"
    generation: Count
    base: Start
    """Step after which the generation begins."""
    drop: Start | None
    """Step after which snapshots of earlier generations are dropped; null to drop none."""
    run: str
    """Name of this run, which distinguishes it from other runs of jobs with the same name."""
    node: Count
    nodes: Count
    owners: Count
    """Number of ranks on this node."""
    first: Address | None = None
    """Address of the memory server on node 0, which exports the job's metrics."""


class PeerPort(Declared):
    port: Port
    """Port on which the server listens; 0 in a job with one node."""


class Listen(Request[PeerPort]):
    """Start to serve other nodes on a free TCP port, and return the port."""

    sender = "agent, rank 0 of a node"
    op: Literal["listen"] = "listen"
    host: str
    """Address of this node, at which the server must listen."""


class Peers(Request[Done]):
    """Set the memory servers of all nodes. This request is sent after nodes joined or left, or after a memory server
    was restarted."""

    sender = "agent, rank 0 of a node"
    op: Literal["peers"] = "peers"
    peers: ByNumber[Address]
    """Address of each node's memory server, including this node's own server."""
    domains: ByNumber[str]
    """Name of each node's failure domain."""
    servers_lost: Count = 0
    """Number of memory servers that the job has lost so far, including those of nodes not in `peers`."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node in this node's parity group; empty without parity."""


class Rescale(Request[Done]):
    """Set the numbers of nodes and ranks for a new generation after a resize."""

    sender = "agent"
    op: Literal["rescale"] = "rescale"
    nodes: Count
    """New number of nodes."""
    owners: Count
    """New number of ranks on this node."""


class ReleaseDeparted(Request[Done]):
    """Free the memory of ranks that a resize has moved to other nodes. The agent sends this request once the resized
    job trains."""

    sender = "agent"
    op: Literal["release_departed"] = "release_departed"
    ranks: Listed[Count]
    """Ranks of this node."""
    world_size: Count


class KeepOnly(Request[Done]):
    """Free the memory of all ranks except `ranks`, because all other ranks belong to earlier runs. The first rank of a
    node sends this request once the node's ranks have several snapshots."""

    sender = "rank 0 of a node"
    op: Literal["keep_only"] = "keep_only"
    ranks: Listed[Count]
    """Ranks of this node."""


class Ended(Request[Done]):
    """Receive no more requests from a dying worker. Requests that the worker has already sent are still handled."""

    sender = "agent"
    op: Literal["ended"] = "ended"
    pid: Count


class Others(Declared):
    others: Listed[Count]
    """Process ids of other scripts' processes that may still be saving under the job's name."""


class WaitOthers(Request[Others]):
    """Wait until no process of another script can still be saving under the job's name. The first rank of a node sends
    this request when a script begins."""

    sender = "rank 0 of a node"
    op: Literal["wait_others"] = "wait_others"
    pids: Listed[Count]
    """Process ids of the sender's own script."""
    timeout_s: Seconds
    """Maximum number of seconds to wait until the other processes end."""


# --- copies to other tiers ----------------------------------------------------------------------


class ScheduleCopy(Request[Done]):
    """Copy the snapshots of a step to a tier. This request is sent for tiers whose interval is in seconds, and for
    tiers whose steps the coordinator chooses."""

    sender = "agent, rank 0 of a node"
    op: Literal["schedule_copy"] = "schedule_copy"
    step: Count
    kind: str | None = None
    """Kind of the tier; null for every durable tier."""


class PeerSchedule(Request[Done]):
    """Forget which steps were scheduled for copies to peers, because a new generation begins."""

    sender = "agent"
    op: Literal["peer_schedule"] = "peer_schedule"
    step: Count | None
    """Last step scheduled for copies to peers; null if the policy's `every_steps` decides which steps are copied."""


class ReplicateNow(Request[Done]):
    """Copy the newest snapshots to peers, even if they are not due, because this node may leave soon."""

    sender = "rank 0 of a node"
    op: Literal["replicate_now"] = "replicate_now"


class UploadProgress(Declared):
    idle: bool
    """Whether all uploads are done; false if the time limit was reached first."""
    tiers: Listed[dict[str, Any]]
    """Fields of each tier: tier, arrived, newest_step, left_ranks, left_bytes, error. The list is empty if this node
    has no snapshot of the checkpoint."""


class UploadNow(Request[UploadProgress]):
    """Upload one checkpoint to every durable tier, even if it is not due, because the job ends."""

    sender = "agent, rank 0 of a node"
    op: Literal["upload_now"] = "upload_now"
    save_id: str
    timeout_s: Seconds


class Idle(Declared):
    idle: bool
    """Whether all due copies are done; false if the time limit was reached first."""


class WaitIdle(Request[Idle]):
    """Wait until all due copies have arrived or failed. An agent, for example, sends this request before its node
    leaves the job."""

    sender = "agent, rank 0 of a node"
    op: Literal["wait_idle"] = "wait_idle"
    timeout_s: Seconds


class Reached(Declared):
    reached: bool
    """Whether the snapshot has reached the requested state; false if the time limit was reached first."""


class WaitState(Request[Reached]):
    """Wait until a snapshot has been sealed, replicated or uploaded."""

    sender = "benchmark"
    op: Literal["wait_state"] = "wait_state"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str
    state: Literal["sealed", "replicated", "durable"]
    timeout_s: Seconds


class CheckTiers(Request[Done]):
    """Check that checkpoints can be written to every durable tier. The first rank of a node sends this request when a
    script begins."""

    sender = "rank 0 of a node"
    op: Literal["check_tiers"] = "check_tiers"


# --- status -------------------------------------------------------------------------------------


class ServerStatus(Declared):
    snapshots: Listed[dict[str, Any]]
    """Snapshots, in the form of the answer to `held`."""
    pieces: Listed[dict[str, Any]] = ()
    """Parity pieces, in the form of the answer to `held`."""
    copying: Listed[dict[str, Any]]
    """For each tier: numbers of copies, bytes_sent, the newest step, last_error."""


class Status(Request[ServerStatus]):
    """Return the state of the server's snapshots and copies. `hp-ext checkpoints` sends this request; the agent sends
    it every few seconds, to log events about copies."""

    sender = "agent, command line"
    op: Literal["status"] = "status"


class ServerProcess(Declared):
    pid: Count
    config: dict[str, Any]
    """Configuration with which the server was started."""


class Handshake(Request[ServerProcess]):
    """Return the server's process id and configuration. The first rank of a node sends this request once it has
    connected to the server or started the server."""

    sender = "rank 0 of a node"
    op: Literal["handshake"] = "handshake"


# fmt: off
AnyOrder = (
    AddPlan | Begin | Stepped | Resolve | Ended | Fence | Enter | Peers | Rescale | ReleaseDeparted | KeepOnly
    | ScheduleCopy | PeerSchedule | ReplicateNow | CheckTiers
)
"""All requests whose answer is `Done`."""
AnyQuestion = (
    Map | NextSlot | Seal | Open | Fetch | FetchHead | Held | Durable | Listen | WaitOthers | UploadNow | WaitIdle
    | WaitState | Status | Handshake
)
# fmt: on
AnyRequest = AnyOrder | AnyQuestion
REQUESTS: Kinds[AnyRequest] = Kinds("request to a memory server", "op", typing.get_args(AnyRequest))
