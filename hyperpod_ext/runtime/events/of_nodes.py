"""Events of nodes: they join and leave, and the job is resized."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator
from hyperpod_ext.runtime.ipc.declared import ByNumber, Count, Listed, Seconds


class OfNode(ByCoordinator):
    """An event of one node."""

    node: Count


class Coordinator(OfNode):
    """Another coordinator has taken over, on `node`."""

    event: Literal["coordinator"] = "coordinator"
    before: Count
    """The node of the coordinator before."""
    term: Count
    """Number of coordinators so far."""


class SteppedDown(OfNode):
    """The coordinator on `node` stops: it reaches no majority, or its node leaves."""

    event: Literal["stepped_down"] = "stepped_down"
    was = ("stood_down",)
    term: Count
    reached: Listed[Count] = ()
    """Nodes that the coordinator still reached."""
    cause: str = ""
    """Why the node leaves."""


class NodeJoined(OfNode):
    """The agent of a node has connected."""

    event: Literal["node_joined"] = "node_joined"
    pid: Count
    """Process ID of the agent."""


class Network(ByAgent):
    """Address at which other nodes reach this node's memory server."""

    event: Literal["network"] = "network"
    interface: str
    """The interface in the job's spec; empty: none."""
    address: str


class OperatorAsked(ByAgent):
    """A caller has used the port of AWS's operator in a pod; the call changed something, or was refused."""

    event: Literal["operator_asked"] = "operator_asked"
    call: str
    """`/start`, `/update`, `/stop` or `/shutdown`."""
    caller: str
    """The caller's address."""
    status: Count
    """HTTP status: 200, 403 for a refused address, 409 for a call that does not fit the job, 422 for a bad body."""
    why: str
    """Why the call was refused; empty: accepted."""
    state: str
    """The pod's state after the call."""


class NodeLost(OfNode):
    """A node is lost, or has not answered for as long as a lost one."""

    event: Literal["node_lost"] = "node_lost"
    cause: str


class NodeReplaced(OfNode):
    """Node `node` takes the ranks of a lost one."""

    event: Literal["node_replaced"] = "node_replaced"
    ranks: Listed[Count]


class AwaitingNode(OfNode):
    """No spare is left: the job waits for another node in place of `node`."""

    event: Literal["awaiting_node"] = "awaiting_node"
    seconds: Seconds
    """Longest wait."""


class NodeLeaves(OfNode):
    """A node was ordered to end, and will leave the job."""

    event: Literal["node_leaves"] = "node_leaves"


class NodeDecommissioned(OfNode):
    """A node's workers end: other nodes have its ranks."""

    event: Literal["node_decommissioned"] = "node_decommissioned"
    was = ("node_retired",)


class NodeLeft(OfNode):
    """A node is no longer a member."""

    event: Literal["node_left"] = "node_left"


class NodesWanted(ByCoordinator):
    """The job requests another set of nodes."""

    event: Literal["nodes_wanted"] = "nodes_wanted"
    nodes: Listed[Count]
    """All nodes requested."""


class Unhealthy(ByAgent):
    """A node has failed a health check; no worker is started on it."""

    event: Literal["unhealthy"] = "unhealthy"
    was = ("ill",)
    fields_were = {"ailments": "problems"}
    problems: dict[str, str]
    """Error of each failed check."""
    seconds: Seconds
    """Duration of the checks."""


class PreemptionNotice(ByAgent):
    """The provider will take the node away."""

    event: Literal["preemption_notice"] = "preemption_notice"
    was = ("notice",)
    cause: str
    seconds_left: float | None = None


class NoNotices(ByAgent):
    """The provider's notices cannot be read."""

    event: Literal["no_notices"] = "no_notices"
    why: str


class MemoryLost(ByAgent):
    """The memory server of a node has ended."""

    event: Literal["memory_lost"] = "memory_lost"
    cause: str
    step: Count
    """The newest step made there."""


class MemoryBack(ByAgent):
    """Another memory server has taken its place."""

    event: Literal["memory_back"] = "memory_back"
    seconds: Seconds


class ForkServerLost(ByAgent):
    """The process that forks the workers of a node has ended; another one is started, and `imported` follows."""

    event: Literal["fork_server_lost"] = "fork_server_lost"
    cause: str
    step: Count
    """The newest step made there."""


# --- resizes --------------------------------------------------------------------------------------


class Resizing(ByCoordinator):
    """An event of a resize."""

    order: str
    """Name of the order; empty: not ordered."""
    nodes: Count
    """Nodes that the job will have, or would have had."""


class ResizeAsked(Resizing):
    """An order to resize, or to move the ranks of a node, was accepted."""

    event: Literal["resize_asked"] = "resize_asked"
    of: Count
    """Nodes that the job has."""
    moving: Count | None = None
    """The node whose ranks are to move."""


class ResizeRefused(Resizing):
    """An order to resize is impossible, or was given up: the job continues with its nodes."""

    event: Literal["resize_refused"] = "resize_refused"
    why: str


class ResizeBegun(Resizing):
    """All nodes of a resize have joined."""

    event: Literal["resize_begun"] = "resize_begun"
    of: Count
    """Nodes that the job has."""
    leaving: Listed[Count]
    joining: Listed[Count]


class RejoinBegun(ByCoordinator):
    """Processes are being started for the missing ranks of a job that continued without them."""

    event: Literal["rejoin_begun"] = "rejoin_begun"
    ranks: Listed[Count]
    """Their future rank numbers."""
    nodes: Listed[Count]
    """Node of each."""


class RejoinGivenUp(ByCoordinator):
    """Missing ranks stay missing until another fault or another node changes the situation."""

    event: Literal["rejoin_given_up"] = "rejoin_given_up"
    missing: Count
    why: str


class ResizePrepared(ByCoordinator):
    """The workers of joining nodes are ready."""

    event: Literal["resize_prepared"] = "resize_prepared"
    ranks: Listed[Count]


class JoiningWorker(ByCoordinator):
    """A worker of a joining node is ready."""

    event: Literal["joining_worker_ready"] = "joining_worker_ready"
    was = ("newcomer",)
    rank: Count
    pid: Count


class JoiningWorkerLost(ByCoordinator):
    """A worker of a joining node ended before the resize."""

    event: Literal["joining_worker_lost"] = "joining_worker_lost"
    was = ("newcomer_lost",)
    rank: Count
    cause: str


class RankStopped(ByCoordinator):
    """A rank has stopped at the agreed step."""

    event: Literal["rank_stopped"] = "rank_stopped"
    was = ("halted",)
    rank: Count
    step: Count


class Resize(Resizing):
    """An event of a resize that all ranks have stopped for."""

    generation: Count
    world_size: Count
    of: Count
    """Nodes that the job had."""
    cause: Literal["order", "nodes", "leave", "lost", "move", "continued", "rejoined"]
    """Why: an order, new nodes, a node that left or was lost, ranks moved to a spare, the job continues without lost
    ranks, or lost ranks have rejoined."""
    local_share: float
    """Share of the state that stays on its node."""
    full_size: Count | None = None
    """Number of ranks when none is missing; null: healthy ranks wait, so no rank is ever missing."""
    samples: Literal["constant", "fewer"] = "constant"
    """Number of samples in a step while ranks are missing."""


class RanksReassigned(Resize):
    """All ranks leave a generation for one with another number of nodes."""

    event: Literal["world"] = "world"
    moved: ByNumber[Count]
    """New rank number of each rank with a surviving process."""


class Resized(Resize):
    """The job has completed the first step with its new number of nodes."""

    event: Literal["resized"] = "resized"
    step: Count
    """The last step with the number of nodes before."""
    pause_s: Seconds
    """Time without a step."""
    pids_kept: bool
    """Whether every surviving rank kept its process."""
