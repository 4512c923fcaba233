"""Stores blobs in memory by namespace, step and rank, and evicts old blobs. Thread-safe. This module uses no sockets.

A step is complete once each rank of its namespace has stored a blob. AWS's client stores a step's metadata as the blob
of one additional rank, whose number follows the last rank's. The newest complete step of a namespace is never evicted
in favour of a newer, incomplete step.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hyperpod_ext.errors import ConflictError, MemoryTierFullError, NotFoundError

MAX_NAMESPACES = 1024
_MIB = 1 << 20


@dataclass(eq=False)
class Blob:
    """One rank's bytes for one step. The blob's memory is freed when its last user releases it."""

    memory: memoryview
    cost: int
    """The blob's size in bytes, rounded up to whole pages, which counts against the budget."""
    namespace: Namespace
    shard_meta: str = ""
    users: int = 1
    """Number of users of the memory: 1 for the store while it keeps the blob, and 1 for each running transfer."""


@dataclass(eq=False)
class Namespace:
    """The stored steps of one job. The names `num_ranks` and `steps_to_retain_per_rank` come from AWS's API."""

    num_ranks: int
    steps_to_retain_per_rank: int
    steps: dict[int, dict[int, Blob]] = field(default_factory=dict)

    def newest_complete(self) -> int | None:
        return max((step for step, ranks in self.steps.items() if len(ranks) == self.num_ranks), default=None)

    def steps_without(self, rank: int, just_put: int) -> list[int]:
        """Return the steps to evict after `rank` has stored step `just_put`: the rank's oldest steps above
        `steps_to_retain_per_rank`."""
        newest = self.newest_complete()
        held = sorted((step for step, ranks in self.steps.items() if rank in ranks), reverse=True)
        return [s for s in held[self.steps_to_retain_per_rank :] if s not in (just_put, newest)]


class Blobs:
    """All blobs of one server. `usable_bytes` returns the node's free memory in bytes; `budget` is the maximum size of
    all blobs, or None for no maximum."""

    def __init__(self, *, budget: int | None, usable_bytes: Callable[[], int]) -> None:
        self._budget, self._usable_bytes = budget, usable_bytes
        self._namespaces: dict[str, Namespace] = {}
        self._reserved = 0
        self._arriving = 0  # bytes of blobs being received; the system still counts unwritten bytes as free
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Number of bytes of all blobs: stored blobs, arriving blobs, and evicted blobs that are still being read."""
        return self._reserved

    def create(self, name: str, num_ranks: int, steps_retained: int) -> None:
        with self._lock:
            if name in self._namespaces:
                raise ConflictError(f"namespace {name!r} already exists")
            if len(self._namespaces) >= MAX_NAMESPACES:
                raise MemoryTierFullError(f"there are {MAX_NAMESPACES} namespaces already; delete one first")
            self._namespaces[name] = Namespace(num_ranks, steps_retained)

    def namespace(self, name: str) -> Namespace:
        try:
            return self._namespaces[name]
        except KeyError:
            raise NotFoundError(f"no namespace {name!r}") from None

    def delete_namespace(self, name: str) -> None:
        with self._lock:
            namespace = self.namespace(name)
            del self._namespaces[name]
            self._give_up(namespace, *namespace.steps)

    def reset(self) -> None:
        """Delete all namespaces and blobs."""
        with self._lock:
            for namespace in self._namespaces.values():
                self._give_up(namespace, *namespace.steps)
            self._namespaces.clear()

    @contextmanager
    def arriving(self, name: str, rank: int, nbytes: int) -> Iterator[Blob]:
        """Yield a new blob with memory to receive `nbytes`. The blob is freed at the end of the `with` block, unless
        `keep` has stored it.

        Raises:
            MemoryTierFullError: there is not enough memory; stored blobs are kept.
        """
        cost = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            namespace = self.namespace(name)
            if not 0 <= rank < namespace.num_ranks:
                raise ValueError(f"rank {rank} is not below num_ranks={namespace.num_ranks} of namespace {name!r}")
            self._make_room(namespace, cost)
            try:
                pages = mmap.mmap(-1, cost, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryTierFullError(f"the system cannot allocate {cost / _MIB:.1f} MiB: {error}") from error
            with suppress(OSError):  # the kernel does not support huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)  # halves the time to store a blob by avoiding page faults
            blob = Blob(memoryview(pages)[:nbytes], cost, namespace)
            self._reserved += cost
            self._arriving += cost
        try:
            yield blob
        finally:
            with self._lock:
                self._arriving -= cost
                self._let_go(blob)

    def keep(self, name: str, rank: int, step: int, blob: Blob, shard_meta: str) -> None:
        """Store the blob of `rank` for `step`. Replaces an earlier blob of the same rank and step."""
        with self._lock:
            namespace = blob.namespace
            if self._namespaces.get(name) is not namespace:
                raise NotFoundError(f"namespace {name!r} was deleted while step {step} of rank {rank} was stored")
            ranks = namespace.steps.setdefault(step, {})
            if rank in ranks:
                self._let_go(ranks[rank])
            blob.shard_meta = shard_meta
            blob.users += 1
            ranks[rank] = blob
            # evict whole steps, because a step without the blob of one rank cannot be restored
            self._give_up(namespace, *namespace.steps_without(rank, step))

    @contextmanager
    def reading(self, name: str, rank: int, step: int) -> Iterator[Blob]:
        """Yield the blob of `rank` for `step`. The blob's memory stays valid inside the `with` block even if the blob
        is deleted meanwhile."""
        with self._lock:
            blob = self._find(self.namespace(name), name, rank, step)
            blob.users += 1
        try:
            yield blob
        finally:
            with self._lock:
                self._let_go(blob)

    def delete(self, name: str, rank: int, step: int) -> None:
        with self._lock:
            namespace = self.namespace(name)
            self._let_go(self._find(namespace, name, rank, step))
            del namespace.steps[step][rank]
            if not namespace.steps[step]:
                del namespace.steps[step]

    def latest(self, name: str, limit: int) -> list[int]:
        """Return the newest steps that any rank has stored, newest first. Always includes the newest complete step."""
        with self._lock:
            namespace = self.namespace(name)
            newest_first = sorted(namespace.steps, reverse=True)
            complete = namespace.newest_complete()
            if complete is None or complete in newest_first[:limit]:
                return newest_first[:limit]
            return [*newest_first[: limit - 1], complete]

    def _find(self, namespace: Namespace, name: str, rank: int, step: int) -> Blob:
        try:
            return namespace.steps[step][rank]
        except KeyError:
            raise NotFoundError(f"rank {rank} has no step {step} in namespace {name!r}") from None

    def _give_up(self, namespace: Namespace, *steps: int) -> None:
        for step in steps:
            for blob in namespace.steps.pop(step).values():
                self._let_go(blob)

    def _let_go(self, blob: Blob) -> None:
        blob.users -= 1
        if blob.users == 0:
            self._reserved -= blob.cost
            blob.memory = memoryview(b"")  # the pages are now unmapped, because this was the last reference

    def _make_room(self, namespace: Namespace, cost: int) -> None:
        """Free `cost` bytes by deleting steps before the newest complete step. Deletes no step if deleting all older
        steps would not free enough."""
        usable = self._usable_bytes() - self._arriving
        room = usable if self._budget is None else min(usable, self._budget - self._reserved)
        complete = namespace.newest_complete()
        evicted = []
        for step in sorted(s for s in namespace.steps if complete is not None and s < complete):
            if room >= cost:
                break
            evicted.append(step)
            room += sum(blob.cost for blob in namespace.steps[step].values() if blob.users == 1)
        if room < cost:
            limit = "no limit of its own" if self._budget is None else f"a budget of {self._budget / _MIB:.1f} MiB"
            raise MemoryTierFullError(
                f"no room for {cost / _MIB:.1f} MiB: the memory tier has {limit}, "
                f"{self._reserved / _MIB:.1f} MiB are taken, and the node can spare {usable / _MIB:.1f} MiB"
            )
        self._give_up(namespace, *evicted)
