"""Events of nodes: nodes join and leave, and the job is resized."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.runtime.events.event import ByAgent, ByCoordinator
from hyperpod_ext.runtime.ipc.declared import ByNumber, Count, Listed, Seconds


class OfNode(ByCoordinator):
    """Base class of events about one node."""

    node: Count


class Coordinator(OfNode):
    """A new coordinator has taken over, on `node`."""

    event: Literal["coordinator"] = "coordinator"
    before: Count
    """The node of the previous coordinator."""
    term: Count
    """Number of coordinators of the job so far."""


class SteppedDown(OfNode):
    """The coordinator on `node` stops, because it reaches no majority or its node leaves."""

    event: Literal["stepped_down"] = "stepped_down"
    was = ("stood_down",)
    term: Count
    reached: Listed[Count] = ()
    """Nodes that the coordinator could still reach."""
    cause: str = ""
    """Why the node leaves the job."""


class NodeJoined(OfNode):
    """The agent of a node has connected."""

    event: Literal["node_joined"] = "node_joined"
    pid: Count
    """Process ID of the agent."""


class Network(ByAgent):
    """Address at which other nodes reach this node's memory server."""

    event: Literal["network"] = "network"
    interface: str
    """The network interface in the job's spec; empty if the spec names none."""
    address: str


class OperatorAsked(ByAgent):
    """A request to the port for AWS's operator in a pod changed the pod's state or was refused."""

    event: Literal["operator_asked"] = "operator_asked"
    call: str
    """Path of the request: `/start`, `/update`, `/stop` or `/shutdown`."""
    caller: str
    """The address that sent the request."""
    status: Count
    """HTTP status: 200, 403 for a refused address, 409 for a request that does not fit the job's state, 422 for a bad
    body."""
    why: str
    """Why the request was refused; empty if it was accepted."""
    state: str
    """The pod's state after the request."""


class NodeLost(OfNode):
    """A node is lost, or has not answered for so long that it counts as lost."""

    event: Literal["node_lost"] = "node_lost"
    cause: str


class NodeReplaced(OfNode):
    """Node `node` takes over the ranks of a lost node."""

    event: Literal["node_replaced"] = "node_replaced"
    ranks: Listed[Count]


class AwaitingNode(OfNode):
    """No spare is left, so the job waits for a new node to replace `node`."""

    event: Literal["awaiting_node"] = "awaiting_node"
    seconds: Seconds
    """Maximum time to wait."""


class NodeLeaves(OfNode):
    """A node was ordered to end, and will leave the job."""

    event: Literal["node_leaves"] = "node_leaves"


class NodeDecommissioned(OfNode):
    """A node's workers end, because other nodes now have its ranks."""

    event: Literal["node_decommissioned"] = "node_decommissioned"
    was = ("node_retired",)


class NodeLeft(OfNode):
    """A node is no longer a member of the job."""

    event: Literal["node_left"] = "node_left"


class NodesWanted(ByCoordinator):
    """The job requests a different set of nodes."""

    event: Literal["nodes_wanted"] = "nodes_wanted"
    nodes: Listed[Count]
    """All nodes that the job requests."""


class Unhealthy(ByAgent):
    """A node has failed a health check, so no worker is started on it."""

    event: Literal["unhealthy"] = "unhealthy"
    was = ("ill",)
    fields_were = {"ailments": "problems"}
    problems: dict[str, str]
    """Error message of each failed check, by name of the check."""
    seconds: Seconds
    """Duration of all checks."""


class PreemptionNotice(ByAgent):
    """The cloud provider announces that it will reclaim the node."""

    event: Literal["preemption_notice"] = "preemption_notice"
    was = ("notice",)
    cause: str
    seconds_left: float | None = None


class NoNotices(ByAgent):
    """The cloud provider's preemption notices cannot be read."""

    event: Literal["no_notices"] = "no_notices"
    why: str


class MemoryLost(ByAgent):
    """The memory server of a node has ended."""

    event: Literal["memory_lost"] = "memory_lost"
    cause: str
    step: Count
    """The newest step made on that node."""


class MemoryBack(ByAgent):
    """A new memory server has replaced the lost one."""

    event: Literal["memory_back"] = "memory_back"
    seconds: Seconds


class ForkServerLost(ByAgent):
    """The process that forks a node's workers has ended. A new one is started, and event `imported` follows."""

    event: Literal["fork_server_lost"] = "fork_server_lost"
    cause: str
    step: Count
    """The newest step made on that node."""


# --- resizes --------------------------------------------------------------------------------------


class Resizing(ByCoordinator):
    """Base class of events of a resize."""

    order: str
    """Name of the resize order; empty if nobody ordered the resize."""
    nodes: Count
    """Number of nodes that the job will have after the resize, or would have had."""


class ResizeAsked(Resizing):
    """The coordinator has accepted an order to resize the job or to move a node's ranks."""

    event: Literal["resize_asked"] = "resize_asked"
    of: Count
    """Number of nodes that the job has now."""
    moving: Count | None = None
    """The node whose ranks are to move."""


class ResizeRefused(Resizing):
    """An order to resize is impossible or was cancelled. The job continues with its present nodes."""

    event: Literal["resize_refused"] = "resize_refused"
    why: str


class ResizeBegun(Resizing):
    """All nodes that a resize needs have joined."""

    event: Literal["resize_begun"] = "resize_begun"
    of: Count
    """Number of nodes that the job has now."""
    leaving: Listed[Count]
    joining: Listed[Count]


class RejoinBegun(ByCoordinator):
    """A job that continued without some ranks starts processes for the missing ranks."""

    event: Literal["rejoin_begun"] = "rejoin_begun"
    ranks: Listed[Count]
    """Future rank numbers of the missing ranks."""
    nodes: Listed[Count]
    """Node of each missing rank."""


class RejoinGivenUp(ByCoordinator):
    """Missing ranks stay missing until a further fault or a new node changes the situation."""

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
    """A worker of a joining node ended before the resize was complete."""

    event: Literal["joining_worker_lost"] = "joining_worker_lost"
    was = ("newcomer_lost",)
    rank: Count
    cause: str


class RankStopped(ByCoordinator):
    """A rank has stopped at the step on which all ranks agreed."""

    event: Literal["rank_stopped"] = "rank_stopped"
    was = ("halted",)
    rank: Count
    step: Count


class Resize(Resizing):
    """Base class of events of a resize for which all ranks have stopped."""

    generation: Count
    world_size: Count
    of: Count
    """Number of nodes that the job had before."""
    cause: Literal["order", "nodes", "leave", "lost", "move", "continued", "rejoined"]
    """Cause of the resize: an order; new nodes; a node left or was lost; ranks move to a spare; the job continues
    without lost ranks; or lost ranks have rejoined."""
    local_share: float
    """Share of the state that stays on the node where it is."""
    full_size: Count | None = None
    """Number of ranks when no rank is missing; null if healthy ranks wait, so that no rank is ever missing."""
    samples: Literal["constant", "fewer"] = "constant"
    """Whether the number of samples in a step stays constant or falls while ranks are missing."""


class RanksReassigned(Resize):
    """All ranks leave a generation. The next generation has a different number of nodes."""

    event: Literal["world"] = "world"
    moved: ByNumber[Count]
    """New rank number of each rank whose process survives, by old number."""


class Resized(Resize):
    """The job has completed its first step with the new number of nodes."""

    event: Literal["resized"] = "resized"
    step: Count
    """The last step with the former number of nodes."""
    pause_s: Seconds
    """Time between the last step before the resize and the first step after it."""
    pids_kept: bool
    """Whether every surviving rank kept its process."""
