"""Constants of one run of a job, and the latest reports of its ranks. Plain values."""

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
    """Free port for scripts that open their own process groups."""
    name: str
    """Name of this run; each run has a different one."""
    term: int = 1
    """Term of this coordinator: 1 for the first coordinator, one more for each later one."""


ADDRESSES_AT_ONCE = 64
"""Most rank addresses in the order that begins a generation. Workers look up all other addresses on demand."""


@dataclass(slots=True)
class Ranks:
    """Reports of the ranks in the current generation."""

    steps: dict[int, int] = field(default_factory=dict)
    """Newest committed step of each rank."""
    _newest: int | None = field(default=None, init=False)
    """Newest committed step of any rank. Stored, because it is read for each step of each rank."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Address of each rank's key-value store, from the rank's join."""
    known: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Addresses of the stores in the generation that began last."""
    known_in: int = 0
    """The generation of the addresses in `known`; 0 if none has begun under this coordinator."""

    def news_of_stores(self, generation: int) -> tuple[int, dict[int, tuple[str, int]]]:
        """Return the store addresses to send at the start of a generation, and the generation whose addresses they
        update (0 if they are a full list).

        A small job gets all addresses, which costs less than look-ups. A large job gets only the changed addresses. If
        too many have changed, it gets none, because workers then look them up.
        """
        before, follows, self.known, self.known_in = self.known, self.known_in, dict(self.stores), generation
        if len(self.stores) <= ADDRESSES_AT_ONCE:
            return 0, dict(self.stores)
        new = {rank: address for rank, address in self.stores.items() if before.get(rank) != address}
        if follows == 0 or len(before) != len(self.stores) or len(new) > ADDRESSES_AT_ONCE:
            return 0, {}
        return follows, new

    def addresses_of(self, ranks: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return the known store addresses of `ranks`, as the answer to a look-up."""
        return {rank: self.stores[rank] for rank in ranks if rank in self.stores}

    def begins(self) -> None:
        """Forget all committed steps at the start of a generation."""
        self.steps.clear()
        self._newest = None

    def committed(self, rank: int, step: int) -> None:
        """Record that a rank has committed a step."""
        self.steps[rank] = step
        self._newest = step if self._newest is None else max(self._newest, step)

    def newest(self, default: int) -> int:
        """Return the newest step that any rank has committed; `default` if no rank has committed one."""
        return default if self._newest is None else self._newest

    def committed_by_all(self, world_size: int) -> int | None:
        """Return the newest step that every rank has committed; None until every rank has committed one."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


@dataclass(slots=True)
class Formation:
    """The time limit for forming a generation. When it has passed, each missing rank counts as failed."""

    limit_s: float
    since: float | None = None
    """When the generation began to form or its newest process was started. None until all first nodes of the job have
    connected."""

    @property
    def job_has_begun(self) -> bool:
        """Whether all first nodes of the job have connected."""
        return self.since is not None

    def begins(self, now: float) -> None:
        """Start the time limit, or restart it."""
        self.since = now

    def is_late(self, now: float) -> bool:
        """Return whether the time limit has passed. If it has, restart it."""
        if self.since is None or now - self.since < self.limit_s:
            return False
        self.since = now
        return True
