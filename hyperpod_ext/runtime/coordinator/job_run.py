"""One run of the job, as its coordinator knows it. Plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig


@dataclass(frozen=True, slots=True)
class JobRun:
    """What stays the same under one coordinator."""

    config: RuntimeConfig
    node: int
    """Where the coordinator is."""
    run_dir: Path
    """Where events.jsonl and report.json go."""
    master_port: int
    """Free port for scripts that open process groups on their own."""
    name: str
    """Names this run of the job."""
    term: int = 1
    """Rises with each coordinator."""


ADDRESSES_AT_ONCE = 64
"""How many addresses of ranks every node is sent when a generation begins; of others they are looked up."""


@dataclass(slots=True)
class Ranks:
    """What ranks have reported in this generation."""

    steps: dict[int, int] = field(default_factory=dict)
    """Newest step that each has committed."""
    _newest: int | None = field(default=None, init=False)
    """Of all of them: each step of each rank asks for it."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Where each serves its keys, as it said when it joined."""
    known: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The same, as it was in the generation that began last."""
    known_in: int = 0
    """That generation; 0: none has begun under this coordinator."""

    def news_of_stores(self, generation: int) -> tuple[int, dict[int, tuple[str, int]]]:
        """A generation begins: which one others know addresses of, and what is new since then.

        A small world is told all: that costs less than look-ups. Of a large one of which much is new, nothing is.
        """
        before, follows, self.known, self.known_in = self.known, self.known_in, dict(self.stores), generation
        if len(self.stores) <= ADDRESSES_AT_ONCE:
            return 0, dict(self.stores)
        new = {rank: address for rank, address in self.stores.items() if before.get(rank) != address}
        if follows == 0 or len(before) != len(self.stores) or len(new) > ADDRESSES_AT_ONCE:
            return 0, {}
        return follows, new

    def addresses_of(self, ranks: Iterable[int]) -> dict[int, tuple[str, int]]:
        """The answer to a look-up."""
        return {rank: self.stores[rank] for rank in ranks if rank in self.stores}

    def begins(self) -> None:
        """Another generation, in which nobody has committed anything yet."""
        self.steps.clear()
        self._newest = None

    def committed(self, rank: int, step: int) -> None:
        """A rank has committed a step."""
        self.steps[rank] = step
        self._newest = step if self._newest is None else max(self._newest, step)

    def newest(self, default: int) -> int:
        """Newest step that any rank has committed."""
        return default if self._newest is None else self._newest

    def committed_by_all(self, world_size: int) -> int | None:
        """Newest step that every rank has committed; None: some rank has not reported any."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


@dataclass(slots=True)
class Formation:
    """Since when a generation forms, or its last new process has been started. One that takes too long is a fault of
    the ranks that are missing."""

    limit_s: float
    since: float | None = None
    """None: not all nodes that the job begins with have come."""

    @property
    def job_has_begun(self) -> bool:
        return self.since is not None

    def begins(self, now: float) -> None:
        self.since = now

    def is_late(self, now: float) -> bool:
        """Whether the time is over; it begins anew then."""
        if self.since is None or now - self.since < self.limit_s:
            return False
        self.since = now
        return True
