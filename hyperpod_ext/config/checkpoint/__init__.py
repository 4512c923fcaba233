"""Tiers of snapshots: their places, intervals and retention."""

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
    """Steps between snapshots. `auto`: 1; our agent sets the best interval after each fault, from the waiting time and
    the number of restores."""
    budget_mib: PositiveInt | None = None
    """Most memory of the tier on one node, in MiB, with replicas of other nodes. Default: all free memory of the
    node."""


class PeerTier(Tuned):
    """Memory of other nodes: survives the loss of `replicas` nodes at once; with `parity`, of one node of each
    group."""

    survives = frozenset({"process", "node"})
    level = "peer"
    kind: Literal["peer"] = "peer"
    every_steps: EverySteps = 10
    """Steps between copies of the newest snapshot to peers. `auto`: 10; our agent sets the best interval in the
    running job, from the cost of copies and the number of faults."""
    replicas: PositiveInt = 1
    """Copies of each snapshot, each on a different node."""
    parity: Annotated[int, Field(ge=3)] | None = None
    """Keep parity instead of copies: nodes form groups of this size. Each node sends its snapshot once, in parts, and
    every other node of the group keeps the XOR of the parts it receives, 1/(parity - 1) of a snapshot. A lost node's
    state is rebuilt from all others of its group; if two of a group are lost, it comes from the next tier. Needs our
    agent, and a job that is not elastic. If the nodes do not divide evenly, some groups are larger."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """Transport of copies. `nixl`: the receiving node reads the sender's memory with NIXL over UCX: shared memory or
    RDMA. NIXL needs the package `nixl-cu12` or `nixl-cu13` in the image, and neither authenticates nor encrypts
    (docs/security.md). If it is missing or fails, copies use TCP."""
    streams: PositiveInt = 2
    """TCP connections for one copy. A single connection is slow on EC2."""
    max_slowdown: Annotated[PositiveFloat, Field(le=1.0)] = 0.05
    """Most slowdown of a step while a copy is sent, as a share of the step. Sending is slowed down to keep it, unless
    that increases the total cost of the copy."""

    @model_validator(mode="after")
    def _copies_or_parity(self) -> Self:
        if self.parity is not None and self.replicas != type(self).model_fields["replicas"].default:
            raise ContradictionError("replicas and parity exclude each other; keep one of them", "parity")
        if self.parity is not None and self.transport == "nixl":
            raise ContradictionError(
                "parity works only over TCP, not over NIXL; remove `parity` or `transport: nixl`", "transport"
            )
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset newer fields, so that images with an older version can read the spec."""
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
    """Return the kinds of tiers that can still be read after a loss."""
    tiers: list[type[Tuned]] = [MemoryTier, PeerTier, *DURABLE.values()]
    return {str(tier.model_fields["kind"].default) for tier in tiers if lost in tier.survives}


class CheckpointPolicy(Config):
    """The tiers in order, nearest first."""

    tiers: tuple[Tier, ...] = (MemoryTier(),)
    """Tiers for snapshots, nearest first; each kind at most once."""
    overlap: bool = True
    """Copy a snapshot during the next forward and backward pass, and wait for it before the next optimizer step.
    False: copy it before the next step begins."""
    when_busy: Literal["wait", "skip", "supersede"] = "supersede"
    """If a save is due while earlier saves are still being copied to slower tiers: `wait` for them, `skip` this save,
    or `supersede` a copy that has not started, or else a running one. The last complete snapshot always stays."""
    finish_s: PositiveFloat = 3600.0
    """Seconds after the last step to upload it to the durable tiers, before the job succeeds. After that time, the
    report has a warning with the missing parts."""
    grace_s: PositiveFloat = 25.0
    """Seconds after SIGTERM or preemption to upload the newest step to the durable tiers. Kubernetes allows 30 by
    default, for the whole shutdown."""

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
        """The durable tiers that all nodes share."""
        return tuple(tier for tier in self.durable() if not tier.on_node)

    def seconds(self) -> dict[str, float]:
        """`every_seconds` of each durable tier that sets it, by kind."""
        return {tier.kind: tier.every_seconds for tier in self.durable() if tier.every_seconds is not None}

    def on_one_machine(self) -> Self:
        """Return the policy for several nodes on one machine."""
        tiers = tuple(tier.on_one_machine() if isinstance(tier, DurableTier) else tier for tier in self.tiers)
        return self.model_copy(update={"tiers": tiers})

    def due(self, step: int) -> bool:
        """Return whether a tier needs a snapshot of `step`. Tiers with an interval in seconds use existing
        snapshots."""
        return any(step % steps == 0 for steps in self._intervals())

    def with_memory_every(self, steps: int) -> Self:
        """Return the policy with another number of steps between snapshots in memory."""
        tiers = tuple(
            tier.model_copy(update={"every_steps": steps}) if isinstance(tier, MemoryTier) else tier
            for tier in self.tiers
        )
        return self.model_copy(update={"tiers": tiers})

    def next_due(self, step: int) -> int:
        """Return the first step from `step` on that is due."""
        return min(-(-step // steps) * steps for steps in self._intervals())

    def _intervals(self) -> list[int]:
        """Return the intervals in steps, without tiers that have one in seconds."""
        return [tier.every_steps for tier in self.tiers if not self._by_time(tier)] or [1]

    @staticmethod
    def _by_time(tier: Tier) -> bool:
        return isinstance(tier, DurableTier) and tier.every_seconds is not None
