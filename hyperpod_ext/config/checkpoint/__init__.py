"""Checkpoint tiers of a job: where snapshots are stored, how often they are written, and how long they are kept."""

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
    """Memory of the node itself. Snapshots survive the death of every worker process on the node."""

    survives = frozenset({"process"})
    level = "memory"
    kind: Literal["memory"] = "memory"
    every_steps: EverySteps = 1
    """Steps between snapshots. With `auto`, the job starts with 1, and our agent computes the best interval after each
    fault, from the time that steps wait for snapshots and the number of restores."""
    budget_mib: PositiveInt | None = None
    """Maximum memory of the tier on one node in MiB, which includes replicas of other nodes' snapshots. Default: all
    free memory of the node."""


class PeerTier(Tuned):
    """Memory of other nodes. Snapshots survive the loss of `replicas` nodes at once. With `parity`, snapshots survive
    the loss of one node in each parity group."""

    survives = frozenset({"process", "node"})
    level = "peer"
    kind: Literal["peer"] = "peer"
    every_steps: EverySteps = 10
    """Steps between copies of the newest snapshot to other nodes. With `auto`, the job starts with 10, and our agent
    adjusts the interval while the job runs, from the cost of copies and the number of faults."""
    replicas: PositiveInt = 1
    """Copies of each snapshot, each on a different node."""
    parity: Annotated[int, Field(ge=3)] | None = None
    """Number of nodes in a parity group; a group keeps XOR parity instead of copies. Each node splits its snapshot into
    parts and sends one part to each other node of the group. Each node stores the XOR of the parts that it receives,
    which has the size of 1/(parity - 1) of a snapshot. The state of a lost node is rebuilt from all other nodes of the
    group. If a group loses two nodes at once, their state is restored from the next tier. Parity needs our agent, and
    is not available for elastic jobs. If the number of nodes is no multiple of `parity`, some groups are larger."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """Transport of copies between nodes. With `nixl`, the receiving node reads the sender's memory with NIXL over UCX,
    through shared memory or RDMA. NIXL needs the package `nixl-cu12` or `nixl-cu13` in the image. NIXL neither
    authenticates nor encrypts (docs/security.md). If NIXL is missing or fails, copies use TCP."""
    streams: PositiveInt = 2
    """Number of TCP connections that send one copy in parallel. A single TCP connection is slow on EC2."""
    max_slowdown: Annotated[PositiveFloat, Field(le=1.0)] = 0.05
    """Maximum slowdown of a step while a copy is sent, as a share of the step's duration: 0.05 is 5 %. A node sends
    copies more slowly to stay below `max_slowdown`, unless slower sending increases the total cost of a copy."""

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
        """Leave out newer fields that have their defaults, so that images with an older version can read the spec."""
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
    """The tiers for snapshots, nearest first, and the rules for copies to slower tiers."""

    tiers: tuple[Tier, ...] = (MemoryTier(),)
    """Tiers for snapshots, nearest first; each kind at most once."""
    overlap: bool = True
    """Whether to copy a snapshot during the next forward and backward pass; the next optimizer step then waits for the
    copy. False: the snapshot is copied before the next step begins."""
    when_busy: Literal["wait", "skip", "supersede"] = "supersede"
    """Action if a save is due while earlier saves are still being copied to slower tiers. `wait`: wait for the earlier
    copies. `skip`: skip the new save. `supersede`: cancel an earlier copy that has not started; if all copies have
    started, cancel a running copy. The last complete snapshot is always kept."""
    finish_s: PositiveFloat = 3600.0
    """Maximum seconds after the last step for its upload to the durable tiers; the job succeeds after the upload. If
    the upload takes longer, a warning in the job's report lists the missing parts of the checkpoint."""
    grace_s: PositiveFloat = 25.0
    """Seconds after SIGTERM or a preemption for the upload of the newest step to the durable tiers. By default,
    Kubernetes allows 30 seconds for the whole shutdown."""

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
        """The durable tiers whose checkpoints all nodes can read."""
        return tuple(tier for tier in self.durable() if not tier.on_node)

    def seconds(self) -> dict[str, float]:
        """Seconds between saves for each durable tier with `every_seconds`, by the tier's kind."""
        return {tier.kind: tier.every_seconds for tier in self.durable() if tier.every_seconds is not None}

    def on_one_machine(self) -> Self:
        """Return the policy for a job whose nodes all run on one machine: each node has its own disk folder."""
        tiers = tuple(tier.on_one_machine() if isinstance(tier, DurableTier) else tier for tier in self.tiers)
        return self.model_copy(update={"tiers": tiers})

    def due(self, step: int) -> bool:
        """Return whether a tier needs a snapshot of `step`. Tiers with `every_seconds` are ignored, because they use
        snapshots that other tiers need anyway."""
        return any(step % steps == 0 for steps in self._intervals())

    def with_memory_every(self, steps: int) -> Self:
        """Return a copy of the policy with `steps` as the interval of the memory tier."""
        tiers = tuple(
            tier.model_copy(update={"every_steps": steps}) if isinstance(tier, MemoryTier) else tier
            for tier in self.tiers
        )
        return self.model_copy(update={"tiers": tiers})

    def next_due(self, step: int) -> int:
        """Return the first step, `step` or later, for which `due` returns True."""
        return min(-(-step // steps) * steps for steps in self._intervals())

    def _intervals(self) -> list[int]:
        """Return `every_steps` of every tier without `every_seconds`; `[1]` if there is no such tier."""
        return [tier.every_steps for tier in self.tiers if not self._by_time(tier)] or [1]

    @staticmethod
    def _by_time(tier: Tier) -> bool:
        return isinstance(tier, DurableTier) and tier.every_seconds is not None
