"""One run of a job: its constants, and the latest reports of its ranks. Plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig


@dataclass(frozen=True, slots=True)
class JobRun:
    """Constants of one run of a job under one coordinator."""

    config: RuntimeConfig
    node: int
    """Node of the coordinator."""
    run_dir: Path
    """Folder of events.jsonl and report.json."""
    master_port: int
    """Free port for scripts that open process groups on their own."""
    name: str
    """Name of this run, different for each one."""
    term: int = 1
    """Number of the coordinator: 1 for the first, one more for each next one."""


ADDRESSES_AT_ONCE = 64
"""Most addresses of ranks in the order that begins a generation. Workers look up all others when they need them."""


@dataclass(slots=True)
class Ranks:
    """Reports of the ranks in this generation."""

    steps: dict[int, int] = field(default_factory=dict)
    """Newest committed step of each rank."""
    _newest: int | None = field(default=None, init=False)
    """Newest committed step of any rank, stored because it is read for each step of each rank."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Address of each rank's key-value store, from its join."""
    known: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Addresses of the stores in the generation that began last."""
    known_in: int = 0
    """The generation of `known`; 0 if none has begun under this coordinator."""

    def news_of_stores(self, generation: int) -> tuple[int, dict[int, tuple[str, int]]]:
        """Return the store addresses to send at the start of a generation, after the generation whose addresses they
        update (0 if they update none).

        A small job gets all addresses, which costs less than look-ups. A large one gets the changed addresses; none
        if too many have changed, because workers then look them up.
        """
        before, follows, self.known, self.known_in = self.known, self.known_in, dict(self.stores), generation
        if len(self.stores) <= ADDRESSES_AT_ONCE:
            return 0, dict(self.stores)
        new = {rank: address for rank, address in self.stores.items() if before.get(rank) != address}
        if follows == 0 or len(before) != len(self.stores) or len(new) > ADDRESSES_AT_ONCE:
            return 0, {}
        return follows, new

    def addresses_of(self, ranks: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return the store addresses of `ranks`, without unknown ones: the answer to a look-up."""
        return {rank: self.stores[rank] for rank in ranks if rank in self.stores}

    def begins(self) -> None:
        """Forget all committed steps, at the start of a generation."""
        self.steps.clear()
        self._newest = None

    def committed(self, rank: int, step: int) -> None:
        """Record that a rank has committed a step."""
        self.steps[rank] = step
        self._newest = step if self._newest is None else max(self._newest, step)

    def newest(self, default: int) -> int:
        """Return the newest step that any rank has committed; `default` if no rank has."""
        return default if self._newest is None else self._newest

    def committed_by_all(self, world_size: int) -> int | None:
        """Return the newest step that every rank has committed; None until all ranks have reported one."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


@dataclass(slots=True)
class Formation:
    """The time limit for forming a generation. If it passes, the missing ranks have a fault."""

    limit_s: float
    since: float | None = None
    """When the generation began to form, or its newest process was started; None until all first nodes of the job have
    connected."""

    @property
    def job_has_begun(self) -> bool:
        """Whether all first nodes of the job have connected."""
        return self.since is not None

    def begins(self, now: float) -> None:
        """Start the time limit, or start it again."""
        self.since = now

    def is_late(self, now: float) -> bool:
        """Return whether the limit has passed, and start it again if so."""
        if self.since is None or now - self.since < self.limit_s:
            return False
        self.since = now
        return True
