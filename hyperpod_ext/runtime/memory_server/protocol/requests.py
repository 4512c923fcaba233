"""What workers, agents and scripts ask the memory server of their node, over its Unix socket, and what it answers.

The first request of a connection carries the protocol's version (`with_version`).
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

Start = Annotated[int, Field(ge=-1, lt=1 << 63)]
"""The step after which something begins; -1: before step 0."""
WhenBusy = Literal["wait", "skip", "supersede"]
CheckpointId = Annotated[tuple[str, str], Strict(False)]
"""URL of a durable tier, and a save id there."""

# --- a worker saves -----------------------------------------------------------------------------


class Mapped(Declared):
    """Comes with a descriptor of the memory; without one where there is none."""

    slots: Count
    slot_bytes: Bytes = 0
    """Of each slot."""


class Map(Request[Mapped]):
    """A rank needs its slots; what comes is shared memory."""

    sender = "worker"
    op: Literal["map"] = "map"
    owner: Count
    """Rank."""
    slot_bytes: Bytes
    """The least that each slot is to hold; 0: only what an earlier process of the rank has left."""


class AddPlan(Request[Done]):
    """A rank has laid out its state anew."""

    sender = "worker"
    op: Literal["add_plan"] = "add_plan"
    digest: str
    document: dict[str, Any]
    """The layout, which must have that digest."""


class FreeSlot(Declared):
    next_slot: Count | None
    """Index; null: this save is to be skipped."""


class NextSlot(Request[FreeSlot]):
    """A rank is about to save, and no earlier answer has named its next slot."""

    sender = "worker"
    op: Literal["next_slot"] = "next_slot"
    owner: Count
    """Rank."""
    when_busy: WhenBusy
    """What to do while all slots are in use: wait for one, skip the save, or give up a copy."""


class Begin(Request[Done]):
    """A rank writes a slot from now on. Its answer is read later."""

    sender = "worker"
    op: Literal["begin"] = "begin"
    owner: Count
    """Rank."""
    slot: Count
    step: Count
    save_id: str
    generation: Count


class Stepped(Request[Done]):
    """A rank has made a step that is not saved. The server does not answer."""

    sender = "worker"
    op: Literal["stepped"] = "stepped"
    owner: Count
    """Rank."""


class SaveRecord(Declared):
    """What a rank says of its snapshot."""

    save_id: str
    world_size: Count
    own_digest: str
    """Of what this rank alone knows."""
    plan: str
    """Digest of the layout."""
    nbytes: Bytes
    """Of the image."""
    values: list[Any]
    """Plain values of the state, in the layout's order."""
    extras: dict[str, Any]
    saved_at: Annotated[float, Unit("Unix s")]
    checked: Annotated[tuple[Bytes, str], Strict(False)] | None = None
    """So many bytes from the start have this CRC64-NVME already."""
    provisional: bool = False
    """Nothing is copied to other tiers before `resolve`."""


class Sealed(Declared):
    crc64nvme: str
    next_slot: Count | None
    """Where the next save goes, if it is free already."""


class Seal(Request[Sealed]):
    """A rank has written its slot. Its answer is read later."""

    sender = "worker"
    op: Literal["seal"] = "seal"
    owner: Count
    """Rank."""
    slot: Count
    record: SaveRecord


class Resolve(Request[Done]):
    """A rank knows whether its provisional snapshot is consistent. Its answer is read later."""

    sender = "worker"
    op: Literal["resolve"] = "resolve"
    owner: Count
    """Rank."""
    save_id: str
    keep: bool
    """False: the snapshot is dropped."""


# --- somebody restores --------------------------------------------------------------------------


class Image(Declared):
    """Comes with a descriptor of the memory that the image lies in."""

    manifest: dict[str, Any]
    plan: dict[str, Any] | None
    """The layout; null where the asker knows it."""
    offset: Bytes
    bound: bool = True
    """False: the checkpoint has no MACs, so that its bytes may be anybody's."""


class Open(Request[Image]):
    """A rank restores from this node's memory."""

    sender = "worker"
    op: Literal["open"] = "open"
    owner: Count
    """Rank that saved it."""
    save_id: str
    known_plan: str = ""
    """Digest of the layout that need not be sent."""


class Fetch(Request[Image]):
    """A rank restores from a durable tier; the image is brought into this node's memory first."""

    sender = "worker"
    op: Literal["fetch"] = "fetch"
    url: str
    folder: str
    rank: Count


class ImageHead(Declared):
    """What is known of an image without its bytes."""

    manifest: dict[str, Any]
    plan: dict[str, Any]
    """The layout."""
    bound: bool = True
    """As of an image."""


class FetchHead(Request[ImageHead]):
    """A rank looks whether it needs anything of a snapshot in a durable tier."""

    sender = "worker"
    op: Literal["fetch_head"] = "fetch_head"
    url: str
    folder: str
    rank: Count


class Snapshots(Declared):
    snapshots: Listed[dict[str, Any]]
    """Of each whole one: rank, world_size, step, save_id, nbytes, crc64nvme, plan, own_digest, saved_at, generation,
    content, sharing, state, and whether it is a replica of another node's rank."""
    pieces: Listed[dict[str, Any]] = ()
    """Of each whole parity piece: rank of this node in its stripe, world_size, step, save_id, generation, nbytes, and
    the stripe, the ranks whose images protect each other."""
    disk: dict[str, Any] = {}
    """What the node's disks have: snapshots, newest generation, problems; see `DiskState`."""


class Held(Request[Snapshots]):
    """List the snapshots in this node's memory: of its own ranks, and replicas of others."""

    sender = "agent, rank 0 of a node"
    op: Literal["held"] = "held"
    owner: Count | None = None
    """Rank whose earlier processes' requests are answered first."""
    pid: Count = 0
    """Process of that rank whose requests are not waited for."""


class DurableCheckpoints(Declared):
    checkpoints: Listed[dict[str, Any]]
    """Of each: step, generation, save_id, world_size, tier, url, folder."""
    generation: Count
    """The newest that any tier knows of."""
    problems: Listed[str]
    unreachable: Listed[str]
    """Those of the problems that leave open whether a tier has a newer one."""


class Durable(Request[DurableCheckpoints]):
    """It is to be decided what to restore, and memory alone does not do."""

    sender = "agent, rank 0 of a node"
    op: Literal["durable"] = "durable"
    exclude: Listed[CheckpointId] = ()
    """Those that were refused."""


# --- generations, and who there is --------------------------------------------------------------


class Fence(Request[Done]):
    """A generation begins: writers of earlier ones are refused."""

    sender = "agent, rank 0 of a node"
    op: Literal["fence"] = "fence"
    generation: Count
    step: Start | None = None
    """Where it begins; later snapshots of earlier generations are dropped. Null: that is not certain yet."""
    run: str = ""
    """Names this run of the job among others of the same name."""
    stored: Listed[str] = ()
    """URLs of the durable tiers that have this step already."""
    again: bool = True
    """Whether the generation saves this step once more: an upload of the former snapshot is given up then."""


class Enter(Request[Done]):
    """A generation begins on a node without an agent, maybe with other ranks than the run before had."""

    sender = "rank 0 of a node"
    op: Literal["enter"] = "enter"
    generation: Count
    base: Start
    """Step after which it begins."""
    drop: Start | None
    """Later snapshots of earlier generations are dropped; null: none are."""
    run: str
    """As in `fence`."""
    node: Count
    nodes: Count
    owners: Count
    """Ranks of this node."""
    first: Address | None = None
    """Where the memory server of node 0 listens, which shows the job's numbers."""


class PeerPort(Declared):
    port: Port
    """0 in a job of one node."""


class Listen(Request[PeerPort]):
    """Other nodes are to reach this memory server."""

    sender = "agent, rank 0 of a node"
    op: Literal["listen"] = "listen"
    host: str
    """Address of this node."""


class Peers(Request[Done]):
    """Nodes have come or gone, or a memory server was started anew."""

    sender = "agent, rank 0 of a node"
    op: Literal["peers"] = "peers"
    peers: ByNumber[Address]
    """Where each node's memory server is reached, this one's too."""
    domains: ByNumber[str]
    """What fails together: a name for each node."""
    servers_lost: Count = 0
    """Memory servers of the job that were lost so far: those of nodes that are not named here, too."""
    group: ByNumber[Listed[Count]] = {}
    """Ranks of each node that keeps parity with this one, this one's too; none: there is no parity."""


class Rescale(Request[Done]):
    """A generation begins of a job whose number of ranks changes."""

    sender = "agent"
    op: Literal["rescale"] = "rescale"
    nodes: Count
    """How many there are from now on."""
    owners: Count
    """Ranks of this one."""


class ReleaseDeparted(Request[Done]):
    """The job has gone on after a resize: what ranks that are elsewhere now had here is not needed."""

    sender = "agent"
    op: Literal["release_departed"] = "release_departed"
    ranks: Listed[Count]
    """Those of this node."""
    world_size: Count


class KeepOnly(Request[Done]):
    """This node's ranks have several snapshots of their own: what ranks of earlier runs left is not needed."""

    sender = "rank 0 of a node"
    op: Literal["keep_only"] = "keep_only"
    ranks: Listed[Count]
    """Those of this node."""


class Ended(Request[Done]):
    """A worker is dying; no more requests come from it."""

    sender = "agent"
    op: Literal["ended"] = "ended"
    pid: Count


class Others(Declared):
    others: Listed[Count]
    """Other processes that may still be saving."""


class WaitOthers(Request[Others]):
    """A script's ranks begin: nobody else may train under the job's name."""

    sender = "rank 0 of a node"
    op: Literal["wait_others"] = "wait_others"
    pids: Listed[Count]
    """Processes of the script."""
    timeout_s: Seconds
    """How long the others are given to end."""


# --- copies to other tiers ----------------------------------------------------------------------


class ScheduleCopy(Request[Done]):
    """A step is due on a tier that goes by time, or by steps that the coordinator names."""

    sender = "agent, rank 0 of a node"
    op: Literal["schedule_copy"] = "schedule_copy"
    step: Count
    kind: str | None = None
    """Kind of the tier; null: every durable one."""


class PeerSchedule(Request[Done]):
    """A generation begins: what was scheduled before for copies to peers counts no more."""

    sender = "agent"
    op: Literal["peer_schedule"] = "peer_schedule"
    step: Count | None
    """The one that is due; null: the policy's `every_steps` counts."""


class ReplicateNow(Request[Done]):
    """This node may be about to go: its newest snapshots are copied to peers, due or not."""

    sender = "rank 0 of a node"
    op: Literal["replicate_now"] = "replicate_now"


class UploadProgress(Declared):
    idle: bool
    """False: the time was over first."""
    tiers: Listed[dict[str, Any]]
    """Of each: tier, arrived, newest_step, left_ranks, left_bytes, error. None where this node has no part in it."""


class UploadNow(Request[UploadProgress]):
    """The job ends: one checkpoint is brought to every durable tier, due or not."""

    sender = "agent, rank 0 of a node"
    op: Literal["upload_now"] = "upload_now"
    save_id: str
    timeout_s: Seconds


class Idle(Declared):
    idle: bool
    """False: the time was over first."""


class WaitIdle(Request[Idle]):
    """Whoever asks leaves once all copies that are due have arrived or failed."""

    sender = "agent, rank 0 of a node"
    op: Literal["wait_idle"] = "wait_idle"
    timeout_s: Seconds


class Reached(Declared):
    reached: bool
    """False: the time was over first."""


class WaitState(Request[Reached]):
    """A benchmark waits for a snapshot's copies."""

    sender = "benchmark"
    op: Literal["wait_state"] = "wait_state"
    owner: Count
    """Rank."""
    save_id: str
    state: Literal["sealed", "replicated", "durable"]
    timeout_s: Seconds


class CheckTiers(Request[Done]):
    """A script begins: can checkpoints be written to every durable tier?"""

    sender = "rank 0 of a node"
    op: Literal["check_tiers"] = "check_tiers"


# --- what people see ----------------------------------------------------------------------------


class ServerStatus(Declared):
    snapshots: Listed[dict[str, Any]]
    """As in the answer to `held`."""
    pieces: Listed[dict[str, Any]] = ()
    """As there."""
    copying: Listed[dict[str, Any]]
    """Of each tier: counts of copies, bytes_sent, the newest step, last_error."""


class Status(Request[ServerStatus]):
    """Every few seconds, for events; and for `hp-ext checkpoints`."""

    sender = "agent, command line"
    op: Literal["status"] = "status"


class ServerProcess(Declared):
    pid: Count
    config: dict[str, Any]
    """With which it was started."""


class Handshake(Request[ServerProcess]):
    """A script's rank has found a memory server, or started one."""

    sender = "rank 0 of a node"
    op: Literal["handshake"] = "handshake"


# fmt: off
AnyOrder = (
    AddPlan | Begin | Stepped | Resolve | Ended | Fence | Enter | Peers | Rescale | ReleaseDeparted | KeepOnly
    | ScheduleCopy | PeerSchedule | ReplicateNow | CheckTiers
)
"""Answered by `Done`."""
AnyQuestion = (
    Map | NextSlot | Seal | Open | Fetch | FetchHead | Held | Durable | Listen | WaitOthers | UploadNow | WaitIdle
    | WaitState | Status | Handshake
)
# fmt: on
AnyRequest = AnyOrder | AnyQuestion
REQUESTS: Kinds[AnyRequest] = Kinds("request to a memory server", "op", typing.get_args(AnyRequest))
