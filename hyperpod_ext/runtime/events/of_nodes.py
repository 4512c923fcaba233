"""Events of nodes joining and leaving, and of resizes of the job."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator
from hyperpod_ext.runtime.ipc.declared import ByNumber, Count, Listed, Seconds


class OfNode(ByCoordinator):
    """Base class of events about one node."""

    node: Count


class Coordinator(OfNode):
    """A new coordinator, on `node`, has taken over."""

    event: Literal["coordinator"] = "coordinator"
    before: Count
    """The node of the previous coordinator."""
    term: Count
    """Number of coordinators that the job has had so far, this one included."""


class SteppedDown(OfNode):
    """The coordinator on `node` gives up its role, because it reaches no majority of the nodes or its node leaves."""

    event: Literal["stepped_down"] = "stepped_down"
    was = ("stood_down",)
    term: Count
    reached: Listed[Count] = ()
    """Nodes that the coordinator could still reach."""
    cause: str = ""
    """Why the node leaves the job; empty if it does not leave."""


class NodeJoined(OfNode):
    """The agent of a node has connected."""

    event: Literal["node_joined"] = "node_joined"
    pid: Count
    """Process ID of the agent."""


class Network(ByAgent):
    """A node has chosen the address at which other nodes reach its memory server."""

    event: Literal["network"] = "network"
    interface: str
    """The network interface named in the job's spec; empty if the spec names none."""
    address: str


class OperatorAsked(ByAgent):
    """A pod has received a request from AWS's operator that changed the pod's state, or that the pod refused."""

    event: Literal["operator_asked"] = "operator_asked"
    call: str
    """Path of the request: `/start`, `/update`, `/stop` or `/shutdown`."""
    caller: str
    """IP address that sent the request."""
    status: Count
    """HTTP status of the answer: 200, 403 for a refused address, 409 for a request that does not fit the pod's state,
    422 for an invalid body."""
    why: str
    """Why the request was refused; empty if it was accepted."""
    state: str
    """State of the pod after the request."""


class NodeLost(OfNode):
    """A node is lost, or has been silent for so long that it counts as lost."""

    event: Literal["node_lost"] = "node_lost"
    cause: str


class NodeReplaced(OfNode):
    """`node` takes over the ranks of a lost node."""

    event: Literal["node_replaced"] = "node_replaced"
    ranks: Listed[Count]


class AwaitingNode(OfNode):
    """No spare is left, so the job waits for a new node to replace the lost `node`."""

    event: Literal["awaiting_node"] = "awaiting_node"
    seconds: Seconds
    """Maximum time that the job waits for a new node."""


class NodeLeaves(OfNode):
    """A node was ordered to end, and will leave the job."""

    event: Literal["node_leaves"] = "node_leaves"


class NodeDecommissioned(OfNode):
    """The workers on a node end, because other nodes have taken over its ranks."""

    event: Literal["node_decommissioned"] = "node_decommissioned"
    was = ("node_retired",)


class NodeLeft(OfNode):
    """A node is no longer a member of the job."""

    event: Literal["node_left"] = "node_left"


class NodesWanted(ByCoordinator):
    """The coordinator has written the list of nodes that the job needs, for the process that starts nodes."""

    event: Literal["nodes_wanted"] = "nodes_wanted"
    nodes: Listed[Count]
    """All nodes that the job requests, its present nodes included."""


class Unhealthy(ByAgent):
    """A node has failed a health check, so no worker is started on the node."""

    event: Literal["unhealthy"] = "unhealthy"
    was = ("ill",)
    fields_were = {"ailments": "problems"}
    problems: dict[str, str]
    """Error message of each failed check, by the name of the check."""
    seconds: Seconds
    """Duration of all checks together."""


class PreemptionNotice(ByAgent):
    """The cloud provider has announced that it will reclaim the node."""

    event: Literal["preemption_notice"] = "preemption_notice"
    was = ("notice",)
    cause: str
    seconds_left: float | None = None


class NoNotices(ByAgent):
    """The cloud provider's preemption notices cannot be read on a node."""

    event: Literal["no_notices"] = "no_notices"
    why: str


class MemoryLost(ByAgent):
    """The memory server of a node has ended."""

    event: Literal["memory_lost"] = "memory_lost"
    cause: str
    step: Count
    """The newest training step that any worker of the node has begun."""


class MemoryBack(ByAgent):
    """A new memory server has replaced one that ended."""

    event: Literal["memory_back"] = "memory_back"
    seconds: Seconds


class ForkServerLost(ByAgent):
    """The fork server, which forks a node's workers, has ended. A new fork server starts, and event `imported`
    follows."""

    event: Literal["fork_server_lost"] = "fork_server_lost"
    cause: str
    step: Count
    """The newest training step that any worker of the node has begun."""


# --- resizes --------------------------------------------------------------------------------------


class Resizing(ByCoordinator):
    """Base class of events about a resize."""

    order: str
    """Name of the order for the resize; empty if there was no order."""
    nodes: Count
    """Number of nodes after the resize, or the requested number if the resize was refused."""


class ResizeAsked(Resizing):
    """The coordinator has accepted an order to resize the job or to move a node's ranks."""

    event: Literal["resize_asked"] = "resize_asked"
    of: Count
    """Number of nodes before the resize."""
    moving: Count | None = None
    """The node whose ranks are to move; null if no ranks move."""


class ResizeRefused(Resizing):
    """An order to resize the job is impossible or was cancelled. The job continues with its present nodes."""

    event: Literal["resize_refused"] = "resize_refused"
    why: str


class ResizeBegun(Resizing):
    """All nodes that a resize needs have joined."""

    event: Literal["resize_begun"] = "resize_begun"
    of: Count
    """Number of nodes before the resize."""
    leaving: Listed[Count]
    joining: Listed[Count]


class RejoinBegun(ByCoordinator):
    """A job that continued without some ranks starts new processes for these missing ranks."""

    event: Literal["rejoin_begun"] = "rejoin_begun"
    ranks: Listed[Count]
    """Rank numbers that the missing ranks will have."""
    nodes: Listed[Count]
    """Node of each missing rank, in the order of `ranks`."""


class RejoinGivenUp(ByCoordinator):
    """The missing ranks could not be started again. Ranks stay missing until the next fault or until a new node
    joins."""

    event: Literal["rejoin_given_up"] = "rejoin_given_up"
    missing: Count
    why: str


class ResizePrepared(ByCoordinator):
    """The workers on joining nodes are ready for the resize."""

    event: Literal["resize_prepared"] = "resize_prepared"
    ranks: Listed[Count]


class JoiningWorker(ByCoordinator):
    """A worker on a joining node is ready for the resize."""

    event: Literal["joining_worker_ready"] = "joining_worker_ready"
    was = ("newcomer",)
    rank: Count
    pid: Count


class JoiningWorkerLost(ByCoordinator):
    """A worker on a joining node ended before the resize was complete."""

    event: Literal["joining_worker_lost"] = "joining_worker_lost"
    was = ("newcomer_lost",)
    rank: Count
    cause: str


class RankStopped(ByCoordinator):
    """A rank has stopped after the step on which all ranks agreed for a resize."""

    event: Literal["rank_stopped"] = "rank_stopped"
    was = ("halted",)
    rank: Count
    step: Count


class Resize(Resizing):
    """Base class of events about a resize for which all ranks have stopped."""

    generation: Count
    world_size: Count
    of: Count
    """Number of nodes before the resize."""
    cause: Literal["order", "nodes", "leave", "lost", "move", "continued", "rejoined"]
    """Cause of the resize: an order; new nodes; a node that left or was lost; a move of ranks to a spare; the job
    continues without lost ranks; or lost ranks have rejoined."""
    local_share: float
    """Share of the state that stays on its node, from 0 to 1."""
    full_size: Count | None = None
    """Number of ranks when no rank is missing. The number is null if ranks are never missing, because healthy ranks
    wait for a replacement."""
    samples: Literal["constant", "fewer"] = "constant"
    """Whether the number of samples per step stays constant or falls while ranks are missing."""


class RanksReassigned(Resize):
    """All ranks leave a generation. The next generation has a different number of nodes or other nodes."""

    event: Literal["world"] = "world"
    moved: ByNumber[Count]
    """New rank number of each rank whose process survives, by its old number."""


class Resized(Resize):
    """The job has completed its first step after a resize."""

    event: Literal["resized"] = "resized"
    step: Count
    """The last step before the resize."""
    pause_s: Seconds
    """Time between the last step before the resize and the first step after it."""
    pids_kept: bool
    """Whether every surviving rank kept its process."""
