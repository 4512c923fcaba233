"""Where snapshots live, how often each place gets one, and how many it keeps."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, PositiveFloat, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from hyperpod_ext.config.base import Config, ContradictionError
from hyperpod_ext.config.checkpoint import disk, file, s3  # noqa: F401  (registers them; a new tier adds its file here)
from hyperpod_ext.config.checkpoint.tier import DURABLE as DURABLE
from hyperpod_ext.config.checkpoint.tier import DurableTier as DurableTier
from hyperpod_ext.config.checkpoint.tier import EverySteps, Loss, Tuned
from hyperpod_ext.config.checkpoint.tier import tier_of as tier_of


class MemoryTier(Tuned):
    """Memory of the node itself: survives the death of every worker process on it."""

    survives = frozenset({"process"})
    level = "memory"
    kind: Literal["memory"] = "memory"
    every_steps: EverySteps = 1
    """Take a snapshot each time this many steps have been made. `auto`: each; under our agent, after each fault what
    then is best, from how long training waited for snapshots and how often the job fell back to them."""
    budget_mib: PositiveInt | None = None
    """Most memory the tier may take on one node, in MiB, replicas of other nodes included. Default:
    whatever the node has free."""


class PeerTier(Tuned):
    """Memory of other nodes: survives the loss of `replicas` nodes at once; by `parity`, of one node of each group."""

    survives = frozenset({"process", "node"})
    level = "peer"
    kind: Literal["peer"] = "peer"
    every_steps: EverySteps = 10
    """Copy the newest snapshot to peers each time this many steps have been made.
    `auto`: under our agent the running job finds the best interval, from what copies cost it and how often it fails;
    elsewhere 10."""
    replicas: PositiveInt = 1
    """Copies of each snapshot, each on a different node."""
    parity: Annotated[int, Field(ge=3)] | None = None
    """Keep parity in place of copies: nodes are in groups of so many, and each sends its snapshot once, in parts of
    which every other node of the group keeps the XOR. A node needs 1/(parity - 1) of a snapshot for it. A lost node's
    state is rebuilt from all others of its group; when two of a group are lost, from the next tier. Under our agent,
    and not in elastic jobs. Nodes that are no multiple of it make some groups larger."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """What carries the bytes of copies. `nixl`: the receiving node reads them from the sender's memory with NIXL over
    UCX: shared memory, RDMA. It takes the package `nixl-cu12` or `nixl-cu13` in the image, and its bytes are neither
    authenticated nor encrypted on their way (docs/security.md). Where it is missing or fails, copies go over TCP."""
    streams: PositiveInt = 2
    """TCP connections that one copy is sent over; a single one is slow on EC2."""
    max_slowdown: Annotated[PositiveFloat, Field(le=1.0)] = 0.05
    """How much longer a step may take while a copy is sent, as a share of the step: sending is slowed
    down until it holds, unless a copy only costs more in all the slower it is sent."""

    @model_validator(mode="after")
    def _copies_or_parity(self) -> Self:
        if self.parity is not None and self.replicas != type(self).model_fields["replicas"].default:
            raise ContradictionError("replicas and parity are two ways to survive a node; give one of them", "parity")
        if self.parity is not None and self.transport == "nixl":
            raise ContradictionError(
                "NIXL carries copies; parity goes over TCP alone: leave one of them out", "transport"
            )
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what came later, what is rendered is what containers of before know."""
        dumped: dict[str, Any] = handler(self)
        if self.parity is None:
            dumped.pop("parity", None)
        if self.transport == "tcp":
            dumped.pop("transport", None)
        return dumped


if TYPE_CHECKING:
    Tier = MemoryTier | PeerTier | DurableTier
else:
    Tier = Annotated[
        Union[MemoryTier, PeerTier, *sorted(DURABLE.values(), key=attrgetter("distance"), reverse=True)],
        Field(discriminator="kind"),
    ]


def survivors(lost: Loss) -> set[str]:
    """Kinds of tiers that can still be read after a loss."""
    tiers: list[type[Tuned]] = [MemoryTier, PeerTier, *DURABLE.values()]
    return {str(tier.model_fields["kind"].default) for tier in tiers if lost in tier.survives}


class CheckpointPolicy(Config):
    """The tiers in order, nearest first."""

    tiers: tuple[Tier, ...] = (MemoryTier(),)
    """Places a snapshot goes to, nearest first; each kind at most once."""
    overlap: bool = True
    """Copy a snapshot beside the next forward and backward pass, and wait for it before the next
    optimizer step. False: copy it at once, before the next step begins."""
    when_busy: Literal["wait", "skip", "supersede"] = "supersede"
    """When a save is due while earlier ones are still being copied to slower tiers: `wait` for them,
    `skip` this one, or `supersede` a copy that has not begun, and one under way only if there is no other.
    The last whole snapshot is never given up."""
    finish_s: PositiveFloat = 3600.0
    """Once the last step is made, seconds in which it is brought to the durable tiers, due there or not, before the
    job succeeds. Where it does not arrive in that time, a warning of the report says what is missing."""
    grace_s: PositiveFloat = 25.0
    """When the job is told to end (SIGTERM, pre-emption), seconds in which its newest step is brought to
    the durable tiers. Kubernetes allows 30 by default, for everything."""

    def memory(self) -> MemoryTier | None:
        """The memory tier of this policy, if it has one."""
        return next((tier for tier in self.tiers if isinstance(tier, MemoryTier)), None)

    def peer(self) -> PeerTier | None:
        """The peer tier of this policy, if it has one."""
        return next((tier for tier in self.tiers if isinstance(tier, PeerTier)), None)

    def durable(self) -> tuple[DurableTier, ...]:
        """The durable tiers of this policy, nearest first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, DurableTier))

    def shared(self) -> tuple[DurableTier, ...]:
        """Those of them in which all nodes see the same."""
        return tuple(tier for tier in self.durable() if not tier.on_node)

    def seconds(self) -> dict[str, float]:
        """`every_seconds` of the durable tiers that have it, by kind."""
        return {tier.kind: tier.every_seconds for tier in self.durable() if tier.every_seconds is not None}

    def on_one_machine(self) -> Self:
        """The policy where several nodes share a machine."""
        tiers = tuple(tier.on_one_machine() if isinstance(tier, DurableTier) else tier for tier in self.tiers)
        return self.model_copy(update={"tiers": tiers})

    def due(self, step: int) -> bool:
        """Whether some tier wants a snapshot of `step`. Tiers that go by time take what the others leave."""
        return any(step % steps == 0 for steps in self._intervals())

    def with_memory_every(self, steps: int) -> Self:
        """The same with another number of steps between two snapshots in memory."""
        tiers = tuple(
            tier.model_copy(update={"every_steps": steps}) if isinstance(tier, MemoryTier) else tier
            for tier in self.tiers
        )
        return self.model_copy(update={"tiers": tiers})

    def next_due(self, step: int) -> int:
        """The first step from `step` on that is due."""
        return min(-(-step // steps) * steps for steps in self._intervals())

    def _intervals(self) -> list[int]:
        """In steps, of the tiers that go by them."""
        return [tier.every_steps for tier in self.tiers if not self._by_time(tier)] or [1]

    @staticmethod
    def _by_time(tier: Tier) -> bool:
        return isinstance(tier, DurableTier) and tier.every_seconds is not None
