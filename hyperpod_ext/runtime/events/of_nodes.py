"""Events of nodes: they come and go, and the job gets another number of them."""

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
    """The node of the one before."""
    term: Count
    """Coordinators so far."""


class SteppedDown(OfNode):
    """The coordinator on `node` stops: it reaches no majority, or its node leaves."""

    event: Literal["stepped_down"] = "stepped_down"
    was = ("stood_down",)
    term: Count
    reached: Listed[Count] = ()
    """Nodes that it still reached."""
    cause: str = ""
    """Why its node leaves."""


class NodeJoined(OfNode):
    """The agent of a node has come."""

    event: Literal["node_joined"] = "node_joined"
    pid: Count
    """Of the agent."""


class Network(ByAgent):
    """Where other nodes reach this one's memory."""

    event: Literal["network"] = "network"
    interface: str
    """As the job names it; empty where it names none."""
    address: str


class OperatorAsked(ByAgent):
    """Somebody has called a pod as AWS's operator does, and that has changed something, or was refused."""

    event: Literal["operator_asked"] = "operator_asked"
    call: str
    """`/start`, `/update`, `/stop` or `/shutdown`."""
    caller: str
    """Address that it came from."""
    status: Count
    """Of HTTP: 200, 403 from an address that may not, 409 where it does not fit the job, 422 for a malformed body."""
    why: str
    """Why it was refused; empty: it was not."""
    state: str
    """Of the pod, after the call."""


class NodeLost(OfNode):
    """A node is gone, or cannot be told from one that is."""

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
    """For how long at most."""


class NodeLeaves(OfNode):
    """A node was told to end, and will be let go."""

    event: Literal["node_leaves"] = "node_leaves"


class NodeDecommissioned(OfNode):
    """A node's workers end: others have its ranks."""

    event: Literal["node_decommissioned"] = "node_decommissioned"
    was = ("node_retired",)


class NodeLeft(OfNode):
    """A node is no member any more."""

    event: Literal["node_left"] = "node_left"


class NodesWanted(ByCoordinator):
    """The job asks for other nodes than it has."""

    event: Literal["nodes_wanted"] = "nodes_wanted"
    nodes: Listed[Count]
    """Every node that it would have."""


class Unhealthy(ByAgent):
    """A node has failed a health check; no worker is started on it."""

    event: Literal["unhealthy"] = "unhealthy"
    was = ("ill",)
    fields_were = {"ailments": "problems"}
    problems: dict[str, str]
    """What is wrong, by check."""
    seconds: Seconds
    """What the checks took."""


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
    """Name of the order; empty: nobody ordered it."""
    nodes: Count
    """Nodes that the job will have, or would have had."""


class ResizeAsked(Resizing):
    """An order to resize, or to move the ranks of a node, was taken."""

    event: Literal["resize_asked"] = "resize_asked"
    of: Count
    """Nodes that the job has."""
    moving: Count | None = None
    """The node whose ranks are to move."""


class ResizeRefused(Resizing):
    """An order to resize cannot come true, or the job goes on with the nodes that it has."""

    event: Literal["resize_refused"] = "resize_refused"
    why: str


class ResizeBegun(Resizing):
    """The nodes of a resize are there."""

    event: Literal["resize_begun"] = "resize_begun"
    of: Count
    """Nodes that the job has."""
    leaving: Listed[Count]
    joining: Listed[Count]


class RejoinBegun(ByCoordinator):
    """Processes are started for ranks that the job continues without."""

    event: Literal["rejoin_begun"] = "rejoin_begun"
    ranks: Listed[Count]
    """Numbers that they will have."""
    nodes: Listed[Count]
    """Node of each."""


class RejoinGivenUp(ByCoordinator):
    """Missing ranks do not come back before another fault, or another node, changes something."""

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
    """Why: somebody ordered it, nodes came, a node left or was lost, ranks moved to a spare, the job continues without
    ranks that were lost, these are back."""
    local_share: float
    """Share of the state that stays on its node."""
    full_size: Count | None = None
    """Ranks that there are when none is missing; null: none ever is, as healthy ranks wait."""
    samples: Literal["constant", "fewer"] = "constant"
    """Samples of a step while ranks are missing."""


class RanksReassigned(Resize):
    """All ranks leave a generation for one with another number of nodes."""

    event: Literal["world"] = "world"
    moved: ByNumber[Count]
    """New rank of each rank whose process stays."""


class Resized(Resize):
    """The first step with another number of nodes was made."""

    event: Literal["resized"] = "resized"
    step: Count
    """The last step with the number of nodes before."""
    pause_s: Seconds
    """Without a step."""
    pids_kept: bool
    """Whether every rank that stays has the process that it had."""
