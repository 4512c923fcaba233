"""Combines the `Join` reports of a node's ranks, and the list of snapshots in the node's memory, into one compact
message. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.messages import WireError
from hyperpod_ext.runtime.snapshot.select import Offer

T = TypeVar("T")


def node_join(
    joins: Mapping[int, c.Join],
    held: Collection[c.HeldSnapshot],
    generation: int,
    pieces: Collection[c.HeldPiece] = (),
    disk: c.DiskState = c.DiskState(),  # noqa: B008  (a frozen instance)
) -> c.NodeJoin:
    """Return one message with the `Join` reports of several ranks and the snapshots in their node's memory."""
    ranks = tuple(sorted(joins))
    return c.NodeJoin(
        generation=generation,
        ranks=ranks,
        pids=tuple(joins[rank].pid for rank in ranks),
        store_ports=tuple(joins[rank].store_port for rank in ranks),
        lives=_once([joins[rank].live for rank in ranks]),
        held=held_commits(held),
        pieces=tuple(pieces),
        disk=disk,
    )


class RankJoin(NamedTuple):
    """The `Join` report of one rank in a `NodeJoin` message, without fields that are the same for all ranks."""

    rank: int
    pid: int
    store_port: int
    live: c.LiveState | None


def joins_of(report: c.NodeJoin) -> Iterator[RankJoin]:
    """Yield the `Join` report of each rank in a `NodeJoin` message.

    Raises:
        WireError: the lists in the message do not have an entry for each rank.
    """
    count = len(report.ranks)
    if count == 0 or {len(report.pids), len(report.store_ports)} != {count}:
        raise WireError("node_join: not every rank has a process and a port")
    lives = _each(report.lives, count)
    yield from map(RankJoin, report.ranks, report.pids, report.store_ports, lives)


def held_commits(held: Collection[c.HeldSnapshot]) -> tuple[c.HeldCommit, ...]:
    """Group snapshots by save (step and generation). A field with the same value for all ranks is stored once."""
    together: dict[tuple[Any, ...], list[c.HeldSnapshot]] = {}
    for one in held:
        key = one.step, one.generation, one.save_id, one.world_size, one.sharing, one.replica
        together.setdefault(key, []).append(one)
    return tuple(
        c.HeldCommit(
            step=step,
            generation=generation,
            save_id=save_id,
            world_size=world_size,
            sharing=sharing,
            replica=replica,
            ranks=tuple(one.rank for one in several),
            own_digests=_once([one.own_digest for one in several]),
            contents=_once([one.content for one in several]),
        )
        for (step, generation, save_id, world_size, sharing, replica), several in together.items()
    )


class HeldOffers(Collection[Offer]):
    """All offers of one node: the snapshots in its memory and on its disks. The `Offer` objects for memory are created
    only during iteration, to save memory."""

    def __init__(
        self,
        commits: Sequence[c.HeldCommit],
        node: int,
        pieces: Sequence[c.HeldPiece] = (),
        on_disk: Sequence[Offer] = (),
    ) -> None:
        self.commits, self._node, self.pieces, self.on_disk = commits, node, pieces, on_disk
        for commit in commits:
            _each(commit.own_digests, len(commit.ranks))
            _each(commit.contents, len(commit.ranks))

    def __len__(self) -> int:
        return sum(len(commit.ranks) for commit in self.commits) + len(self.pieces) + len(self.on_disk)

    def __contains__(self, offer: object) -> bool:
        return any(offer == one for one in self)

    def __iter__(self) -> Iterator[Offer]:
        for commit in self.commits:
            digests, contents = (_each(values, len(commit.ranks)) for values in (commit.own_digests, commit.contents))
            for rank, digest, content in zip(commit.ranks, digests, contents, strict=True):
                yield Offer(
                    "memory",
                    commit.step,
                    rank,
                    self._node,
                    commit.save_id,
                    digest,
                    commit.sharing,
                    content,
                    commit.world_size,
                )
        for piece in self.pieces:
            yield Offer.of_piece(piece.model_dump(), self._node)
        yield from self.on_disk


def _once(values: Sequence[T]) -> tuple[T, ...]:
    """Return a tuple of only the first value if all values are equal, otherwise a tuple of all values."""
    return tuple(values[:1]) if all(value == values[0] for value in values) else tuple(values)


def _each(values: Sequence[T], count: int) -> Sequence[T]:
    """Return one value for each of `count` ranks, and repeat the value if `values` has only one. `_each` is the inverse
    of `_once`.

    Raises:
        WireError: the number of values is neither 1 nor `count`.
    """
    if len(values) not in (1, count) or not count:
        raise WireError(f"{len(values)} values for {count} ranks")
    return values if len(values) == count else [values[0]] * count
