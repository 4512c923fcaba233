from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hyperpod_ext.runtime.agent.reports import Gathering
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.ipc.gathered import HeldOffers, joins_of, node_join
from hyperpod_ext.runtime.ipc.messages import WireError
from hyperpod_ext.runtime.snapshot.select import Offer


def live(step: int) -> c.LiveState:
    return c.LiveState(step=step, save_id=f"g1-s{step}", own_digest="d", sharing="same")


def held(rank: int, step: int, content: str = "c", **more: Any) -> c.HeldSnapshot:
    known = {"generation": 1, "save_id": f"g1-s{step}", "world_size": 4, "own_digest": "d", "sharing": "same"}
    return c.HeldSnapshot(rank=rank, step=step, content=content, **known | more)


def join(rank: int, step: int | None = 5) -> c.Join:
    return c.Join(rank=rank, pid=100 + rank, live=None if step is None else live(step), store_port=rank)


@pytest.mark.parametrize("steps", [(5, 5), (5, 4), (5, None)])
def test_what_is_gathered_is_what_each_has_said(steps: tuple[int | None, int | None]) -> None:
    joins = {rank: join(rank, step) for rank, step in zip((3, 2), steps, strict=True)}
    snapshots = [held(2, 5), held(3, 5), held(3, 4), held(0, 4, "x", replica=True), held(1, 5, "y")]
    gathered = node_join(joins, snapshots, generation=1)
    again = c.AGENT_REPORTS.decode(encode(gathered))
    assert isinstance(again, c.NodeJoin)
    assert {one.rank: (one.live, one.pid, one.store_port) for one in joins_of(again)} == {
        rank: (one.live, one.pid, one.store_port) for rank, one in joins.items()
    }
    offers = HeldOffers(again.held, 7)
    expected = [Offer.of_memory(encode(one), 7) for one in snapshots]
    assert sorted(offers, key=repr) == sorted(expected, key=repr)
    assert len(offers) == len(expected)
    assert expected[0] in offers


def test_parity_pieces_are_offers_beside_the_snapshots() -> None:
    known = {"step": 5, "generation": 1, "save_id": "g1-s5", "world_size": 4, "stripe": (1, 3, 5)}
    piece = c.HeldPiece(rank=3, **known)
    again = c.AGENT_REPORTS.decode(encode(node_join({3: join(3)}, [held(3, 5, sharing="shard")], 1, [piece])))
    assert isinstance(again, c.NodeJoin)
    offers = HeldOffers(again.held, 7, again.pieces)
    assert len(offers) == len(list(offers)) == 2
    assert list(offers)[1] == Offer("parity", 5, 3, 7, "g1-s5", sharing="shard", world_size=4, stripe=(1, 3, 5))


def test_what_all_say_alike_is_said_once() -> None:
    one, many = (node_join({r: join(r) for r in range(n)}, [held(r, 5) for r in range(n)], 1) for n in (1, 8))
    assert len(many.lives) == len(many.held) == len(many.held[0].contents) == len(one.lives) == 1


def test_a_gathering_that_leaves_something_out_is_refused() -> None:
    whole = node_join({0: join(0), 1: join(1), 2: join(2)}, [], 1)
    for damage in ({"ranks": ()}, {"pids": (1,)}, {"lives": ()}, {"lives": (None, None)}):
        with pytest.raises(WireError):
            list(joins_of(whole.model_copy(update=damage)))


def test_joins_are_sent_when_all_have_joined_and_before_anything_that_is_said_after_them() -> None:
    async def run() -> list[str]:
        said = list[Any]()
        gathering = Gathering(said.append, lambda: [0, 1])
        gathering.join(0, join(0), ())
        assert said == []
        gathering.join(1, join(1), ())
        gathering.drop()
        gathering.join(0, join(0), ())
        gathering.tell(c.Leave())
        gathering.restored(0, c.Restored(attempt=1, error=""))
        gathering.restored(1, c.Restored(attempt=1, error=""))
        gathering.drop()
        gathering.join(1, join(1), ())
        gathering.drop()
        gathering.flush()
        assert [list(one.ranks) for one in said if not isinstance(one, c.Leave)] == [[0, 1], [0], [0, 1]]
        gathering.join(1, join(1), ())
        while len(said) < 5:
            await asyncio.sleep(0)  # the others do not come
        return [one.type for one in said]

    said = asyncio.run(asyncio.wait_for(run(), 30))
    assert said == ["node_join", "node_join", "leave", "restored", "node_join"]


def test_the_last_one_is_not_kept_waiting_for_those_that_were_sent_before_it() -> None:
    """An event of one rank sends what others have said so far: 10 ms more for each join and each restore of a fault."""

    async def run() -> list[Any]:
        said = list[Any]()
        gathering = Gathering(said.append, lambda: [0, 1])
        gathering.join(0, join(0), ())
        gathering.tell(c.Event(event="aborted", t=0.0, fields={}))
        gathering.join(1, join(1), ())
        gathering.restored(1, c.Restored(attempt=1, error=""))
        gathering.tell(c.Event(event="groups_open", t=0.0, fields={}))
        gathering.restored(0, c.Restored(attempt=1, error=""))
        return said

    said = asyncio.run(run())
    assert [one.type for one in said] == ["node_join", "event", "node_join", "restored", "event", "restored"]


def test_who_said_it_before_says_it_again_of_what_comes_next() -> None:
    async def run() -> list[Any]:
        said = list[Any]()
        gathering = Gathering(said.append, lambda: [0, 1])
        for rank in (0, 1):
            gathering.restored(rank, c.Restored(attempt=1, error=""))
        gathering.restored(0, c.Restored(attempt=2, error=""))
        assert len(said) == 1
        gathering.restored(1, c.Restored(attempt=2, error=""))
        assert len(said) == 2
        gathering.join(0, join(0), ())
        gathering.tell(c.Leave())
        gathering.take_back(0)  # another process comes in its place
        gathering.join(1, join(1), ())
        assert len(said) == 4
        gathering.join(0, join(0), ())
        assert len(said) == 5
        gathering.drop()  # the generation is over
        gathering.join(0, join(0), ())
        return said

    assert len(asyncio.run(run())) == 5
