"""Data about one run of a job: constants, latest reports of the ranks, and time limit for forming a generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig


@dataclass(frozen=True, slots=True)
class JobRun:
    """Values that do not change during one run of a job under one coordinator."""

    config: RuntimeConfig
    node: int
    """Number of the node on which the coordinator runs."""
    run_dir: Path
    """Folder that contains events.jsonl and report.json."""
    master_port: int
    """Free port (`MASTER_PORT`) for scripts that create their own process groups."""
    name: str
    """Random name of this run, which distinguishes it from other runs of the job."""
    term: int = 1
    """Term of this coordinator: 1 for the first coordinator of the run, and one more for each later coordinator."""


ADDRESSES_AT_ONCE = 64
"""Maximum number of store addresses in the order that begins a generation. Workers request the remaining addresses when
they need them."""


@dataclass(slots=True)
class Ranks:
    """What ranks have reported in the current generation: committed steps and store addresses."""

    steps: dict[int, int] = field(default_factory=dict)
    """Maps each rank to its newest committed step."""
    _newest: int | None = field(default=None, init=False)
    """Newest committed step of any rank. Cached, because computing it from `steps` for each event is slow."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Maps each rank to the address of its key-value store, which the rank reports when it joins a generation."""
    known: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Maps each rank to its store address in generation `known_in`."""
    known_in: int = 0
    """The last generation that began under this coordinator; 0 if no generation has begun under this coordinator."""

    def news_of_stores(self, generation: int) -> tuple[int, dict[int, tuple[str, int]]]:
        """Return a generation number and the store addresses to send at the start of `generation`. Workers add these
        addresses to the addresses of the returned generation; if the returned number is 0, all earlier addresses are
        invalid.

        In a small job, all addresses are sent, which costs less than look-ups. In a large job, only changed addresses
        are sent. If too many addresses have changed, none is sent, and workers look up the addresses that they need.
        """
        before, follows, self.known, self.known_in = self.known, self.known_in, dict(self.stores), generation
        if len(self.stores) <= ADDRESSES_AT_ONCE:
            return 0, dict(self.stores)
        new = {rank: address for rank, address in self.stores.items() if before.get(rank) != address}
        if follows == 0 or len(before) != len(self.stores) or len(new) > ADDRESSES_AT_ONCE:
            return 0, {}
        return follows, new

    def addresses_of(self, ranks: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return the store addresses of those `ranks` that have joined, as the answer to a look-up."""
        return {rank: self.stores[rank] for rank in ranks if rank in self.stores}

    def begins(self) -> None:
        """Clear the committed steps of all ranks, because a generation begins."""
        self.steps.clear()
        self._newest = None

    def committed(self, rank: int, step: int) -> None:
        """Record that `rank` has committed `step`."""
        self.steps[rank] = step
        self._newest = step if self._newest is None else max(self._newest, step)

    def newest(self, default: int) -> int:
        """Return the newest step that any rank has committed in this generation; `default` if no rank has committed
        one."""
        return default if self._newest is None else self._newest

    def committed_by_all(self, world_size: int) -> int | None:
        """Return the newest step that every rank has committed; None if some rank has not committed a step in this
        generation."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


@dataclass(slots=True)
class Formation:
    """The time limit for forming a generation. When the limit has passed, each rank that has not joined is treated as
    failed."""

    limit_s: float
    since: float | None = None
    """Time at which the generation began to form, or at which its newest process was started; None until all initial
    nodes of the job have connected."""

    @property
    def job_has_begun(self) -> bool:
        """Whether the job has begun, because all its initial nodes have connected."""
        return self.since is not None

    def begins(self, now: float) -> None:
        """Start the time limit, or restart it."""
        self.since = now

    def is_late(self, now: float) -> bool:
        """Return whether the time limit has passed. A time limit that has passed is restarted."""
        if self.since is None or now - self.since < self.limit_s:
            return False
        self.since = now
        return True
