"""The choice of a step, without a membership around it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.ipc.control_messages import HeldCommit
from hyperpod_ext.runtime.ipc.gathered import HeldOffers
from hyperpod_ext.runtime.membership.actions import AskDurable, Fail
from hyperpod_ext.runtime.membership.restoring import RestoreNegotiation
from hyperpod_ext.runtime.snapshot.select import Decision, Offer

NODES = {0: 0, 1: 1}


def live(rank: int, step: int) -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g1-s{step}")


def stored(step: int) -> Offer:
    return Offer("durable", step, -1, -1, f"g1-s{step}", world_size=2, url="s3://b/j", folder=f"step {step}", name="s3")


def shard(rank: int, step: int) -> Offer:
    return Offer("memory", step, rank, NODES[rank], f"g1-s{step}", own_digest=f"own{rank}", sharing="shard")


def test_with_nothing_anywhere_all_start_from_nothing() -> None:
    negotiation = RestoreNegotiation()
    decided = negotiation.decide(NODES, {}, 0)
    assert isinstance(decided, Decision)
    assert (decided.step, negotiation.attempt) == (0, 1)


def test_memory_that_outlives_a_run_is_not_given_up_for_a_fresh_start() -> None:
    for outlives, kind in ((False, Decision), (True, Fail)):
        negotiation = RestoreNegotiation(outlives_run=outlives)
        negotiation.hold(0, [shard(0, 4)])
        assert isinstance(negotiation.decide(NODES, {}, 0), kind)


def test_durable_tiers_are_asked_first_and_again_besides_what_was_refused() -> None:
    negotiation = RestoreNegotiation(durable=True)
    assert negotiation.decide(NODES, {}, 0) == AskDurable()
    negotiation.durable_answered([stored(8)], (), ())
    decided = negotiation.decide(NODES, {}, 0)
    assert isinstance(decided, Decision)
    negotiation.refuse({0: "CRC64-NVME", 1: "too"}, NODES)
    assert negotiation.is_asking
    assert negotiation.decide(NODES, {}, 0) == AskDurable((("s3://b/j", "g1-s8"),))
    assert negotiation.awaits([("s3://b/j", "g1-s8")])
    assert not negotiation.awaits([]), "an answer to the generation before: it would take the rest for all"
    assert RestoreNegotiation(durable=True).awaits([])
    negotiation.durable_answered([], (), ())
    failed = negotiation.decide(NODES, {}, 0)
    assert isinstance(failed, Fail)
    assert "last attempt: rank 0: CRC64-NVME" in failed.message, "a durable checkpoint is there: no fresh start"


def test_ranks_whose_processes_are_gone_offer_nothing() -> None:
    negotiation = RestoreNegotiation()
    for rank in NODES:
        negotiation.join(rank, live(rank, 5))
    negotiation.forget_ranks([0])
    assert set(negotiation.joined) == {1}
    negotiation.hold(0, [shard(0, 7), shard(1, 7)])
    negotiation.forget_node(0)
    decided = negotiation.decide(NODES, {}, 5)
    assert isinstance(decided, Decision)
    assert decided.step == 5


def test_all_have_restored_once_each_has_said_so_of_the_last_attempt() -> None:
    negotiation = RestoreNegotiation()
    negotiation.hold(0, [shard(rank, step) for rank in NODES for step in (5, 6)])
    negotiation.decide(NODES, {}, 6)
    assert not negotiation.all_restored(0)
    negotiation.refuse({1: "damaged"}, NODES)
    negotiation.decide(NODES, {}, 5)
    assert [negotiation.all_restored(rank) for rank in (1, 1, 0)] == [False, False, True]


@given(
    st.lists(st.sampled_from([5, 5, 5, 4, None]), min_size=6, max_size=6),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([3, 4, 5, 6]),
            st.integers(0, 5),
            st.sampled_from(["c", "c", "other"]),
            st.sampled_from(["same"] * 19 + ["alike"]),
        ),
        max_size=8,
    ),
    st.dictionaries(st.integers(1, 3), st.integers(2, 5), max_size=2),
)
def test_a_decision_from_few_offers_is_the_one_from_all(
    lives: list[int | None], held: list[tuple[int, int, int, str, str]], began: dict[int, int]
) -> None:
    nodes = {rank: rank // 2 for rank in range(6)}
    short, long = RestoreNegotiation(), RestoreNegotiation()
    for rank, step in enumerate(lives):
        offer = None if step is None else Offer("live", step, rank, nodes[rank], f"g1-s{step}", "d", "same")
        short.join(rank, offer)
        long.join(rank, offer)
    for node in range(3):
        commits = [
            HeldCommit(
                step=step,
                generation=1,
                save_id=f"g1-s{step}",
                world_size=6,
                sharing=sharing,
                replica=False,
                ranks=(rank,),
                own_digests=("d",),
                contents=(content,),
            )
            for at, step, rank, content, sharing in held
            if at == node
        ]
        short.hold(node, HeldOffers(commits, node))
        long.hold(node, list(HeldOffers(commits, node)))
    few, every = (one.decide(nodes, began, 1) for one in (short, long))
    assert few == every


# --- parity ---------------------------------------------------------------------------------------

TRIO = {0: 0, 1: 1, 2: 2}


def held(node: int, *steps: int, stripe: tuple[int, ...] = (0, 1, 2)) -> list[Offer]:
    """What a node has of its rank of the same number, and the pieces that it keeps."""
    found = []
    for step in steps:
        save_id = f"g1-s{step}"
        found.append(Offer("memory", step, node, node, save_id, own_digest=str(node), sharing="shard"))
        found.append(Offer("parity", step, node, node, save_id, sharing="shard", stripe=stripe))
    return found


def test_a_rank_that_cannot_rebuild_strikes_its_pieces_and_no_snapshot() -> None:
    negotiation = RestoreNegotiation()
    for node in (0, 2):
        negotiation.hold(node, held(node, 4, 8))
    first = negotiation.decide(TRIO, {}, 8)
    assert isinstance(first, Decision)
    assert (first.step, first.source(1).kind) == (8, "parity")
    negotiation.refuse({1: "CRC64-NVME"}, TRIO)
    second = negotiation.decide(TRIO, {}, 8)
    assert isinstance(second, Decision)
    assert (second.step, second.source(1).kind, second.source(0).kind) == (4, "parity", "memory")
    assert negotiation.short_parity({}) is None  # not because too many were lost


def test_two_lost_of_a_group_are_said_with_the_next_tiers_step() -> None:
    negotiation = RestoreNegotiation(durable=True)
    negotiation.hold(0, held(0, 4, 8))
    negotiation.durable_answered([replace(stored(6), world_size=3)], (), ())
    decided = negotiation.decide(TRIO, {}, 8)
    assert isinstance(decided, Decision)
    assert decided.step == 6
    assert negotiation.short_parity({}) == (8, (1, 2))
    assert negotiation.short_parity({2: 5}) is None  # that step was given up


def test_a_step_that_some_have_overwritten_is_not_two_that_were_lost() -> None:
    """It was never whole in all pieces, so that nobody had to keep it."""
    negotiation = RestoreNegotiation()
    negotiation.hold(0, [*held(0, 4), held(0, 8)[1], held(0, 9)[0]])
    negotiation.hold(2, held(2, 4, 8))
    decided = negotiation.decide(TRIO, {}, 9)
    assert isinstance(decided, Decision)
    assert (decided.step, decided.source(1).kind) == (4, "parity")
    assert negotiation.short_parity({}) is None


def test_a_node_that_came_for_a_lost_one_counts_until_it_has_parity_itself() -> None:
    negotiation = RestoreNegotiation(durable=True)
    negotiation.hold(0, held(0, 8))
    negotiation.hold(1, [replace(held(1, 9)[0], save_id="g2-s9")])
    negotiation.durable_answered([replace(stored(6), world_size=3)], (), ())
    assert isinstance(negotiation.decide(TRIO, {1: 0, 2: 8}, 9), Decision)
    assert negotiation.short_parity({1: 0, 2: 8}) == (8, (1, 2))


def test_two_lost_of_a_group_and_no_other_tier_is_the_last_word() -> None:
    negotiation = RestoreNegotiation()
    negotiation.hold(0, held(0, 4))
    decided = negotiation.decide(TRIO, {}, 4)
    assert isinstance(decided, Fail)
    assert "can rebuild one node of a group, but the snapshots of ranks 1, 2 are missing." in str(decided)
