"""Which snapshot all nodes upload when a job ends."""

from __future__ import annotations

from hyperpod_ext.runtime.coordinator.final_save import FinalSave
from hyperpod_ext.runtime.ipc.control_messages import HeldSnapshot


def snapshot(rank: int, step: int, *, replica: bool = False, world_size: int = 2) -> HeldSnapshot:
    return HeldSnapshot(
        rank=rank,
        step=step,
        generation=1,
        save_id=f"g1-s{step}",
        world_size=world_size,
        own_digest="",
        sharing="same",
        content="",
        replica=replica,
    )


def test_it_is_the_newest_that_every_rank_has_on_its_own_node() -> None:
    save = FinalSave()
    save.held[0] = (snapshot(0, 12), snapshot(0, 13), snapshot(1, 13, replica=True))
    assert not save.choose({0, 1}), "node 1 has yet to report"
    save.held[1] = (snapshot(1, 12),)
    assert save.choose({0, 1})
    assert (save.save_id, save.step) == ("g1-s12", 12)
    assert not save.choose({0, 1}), "it stays what it is"


def test_there_is_none_where_a_node_is_lost_that_alone_had_its_part() -> None:
    save = FinalSave()
    save.held[0] = (snapshot(0, 13),)
    save.lost(1)
    assert save.choose({0})
    assert (save.save_id, save.step) == ("", None)


def test_it_may_be_of_a_world_that_the_job_is_about_to_leave() -> None:
    """As where all nodes are told to end, and some of them left before that was known."""
    save = FinalSave()
    save.held = {0: (snapshot(0, 12), snapshot(0, 13), snapshot(0, 14, world_size=3)), 1: (snapshot(1, 13),), 2: ()}
    assert save.choose({0, 1, 2})
    assert save.save_id == "g1-s13"


def test_what_a_node_has_reported_counts_when_it_is_lost_later() -> None:
    save = FinalSave()
    save.held = {0: (snapshot(0, 13),), 1: (snapshot(1, 13),)}
    save.lost(1)
    assert save.choose({0})
    assert save.save_id == "g1-s13"


def test_it_is_complete_once_every_node_that_is_left_is_done() -> None:
    save = FinalSave()
    save.done(0)
    assert not save.is_complete({0, 1})
    assert save.is_complete({0})
