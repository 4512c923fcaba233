"""The one decision that must never be wrong: which step, and whose bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.checkpoint.choose import Decision, Offer, Source, choose_step, is_replicated, start_fresh

NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def live(rank: int, step: int, own: str = "", generation: int = 1) -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g{generation}-s{step}", own)


def memory(rank: int, step: int, own: str = "", generation: int = 1) -> Offer:
    return Offer("memory", step, rank, NODES[rank], f"g{generation}-s{step}", own)


def test_nothing_held_anywhere_is_no_decision():
    assert choose_step([], NODES) is None


def test_survivors_keep_what_they_have_and_the_newcomer_takes_its_own_snapshot():
    offers = [live(0, 7), live(1, 7), live(3, 7), memory(2, 7), memory(2, 6)]
    decision = choose_step(offers, NODES)
    assert decision is not None
    assert decision.step == 7
    assert {rank: source.kind for rank, source in decision.sources.items()} == {
        0: "self",
        1: "self",
        2: "memory",
        3: "self",
    }


def test_without_its_own_snapshot_the_newcomer_takes_a_live_peer_on_its_node():
    decision = choose_step([live(0, 7), live(1, 7), live(3, 7), memory(2, 6)], NODES)
    assert decision is not None
    assert decision.sources[2] == Source("live", 3, "g1-s7")


def test_a_laggard_rolls_forward_and_nobody_rolls_back():
    decision = choose_step([live(0, 8), live(1, 7), live(3, 8)], NODES)
    assert decision is not None
    assert decision.step == 8
    assert decision.sources[1] == Source("live", 0, "g1-s8")


def test_state_that_is_each_ranks_own_is_never_taken_from_another_rank():
    """Rank 2 finished no step 8 that is still held, so step 8 cannot be had, however many others have it."""
    offers = [live(rank, 8, own=f"own{rank}") for rank in (0, 1, 3)]
    offers += [memory(rank, 7, own=f"own{rank}") for rank in NODES]
    decision = choose_step(offers, NODES)
    assert decision is not None
    assert decision.step == 7
    assert all(source.rank == rank for rank, source in decision.sources.items())


def test_parts_of_one_state_are_of_one_commit():
    """Step 7 was made in two generations; no generation's copy is whole, so step 6 it is."""
    offers = [memory(rank, 7, own=str(rank), generation=1 + rank % 2) for rank in NODES]
    offers += [memory(rank, 6, own=str(rank)) for rank in NODES]
    decision = choose_step(offers, NODES)
    assert decision is not None
    assert decision.step == 6


def test_another_nodes_memory_is_out_of_reach():
    assert choose_step([memory(0, 5), memory(1, 5)], NODES) is None


def test_a_decision_survives_the_wire():
    decision = choose_step([live(0, 8), live(1, 8), memory(2, 8), live(3, 8)], NODES)
    assert decision is not None
    assert Decision.from_json(decision.to_json()) == decision
    assert start_fresh(NODES).step == 0


offers_strategy = st.lists(
    st.builds(
        lambda tier, step, rank, own, generation: (live if tier else memory)(rank, step, own, generation),
        st.booleans(),
        st.integers(0, 4),
        st.integers(0, 3),
        st.sampled_from(["", "a", "b"]),
        st.integers(1, 2),
    ),
    max_size=24,
)


@given(offers_strategy)
def test_every_decision_is_whole_and_the_newest_there_is(offers: list[Offer]):
    decision = choose_step(offers, NODES)
    replicated = is_replicated(offers)

    def can(rank: int, step: int, commit: str | None) -> bool:
        return any(
            offer.step == step
            and (commit is None or offer.save_id == commit)
            and (offer.rank == rank or replicated)
            and (offer.tier == "live" or offer.node == NODES[rank])
            for offer in offers
        )

    possible = {
        offer.step
        for offer in offers
        if all(can(rank, offer.step, None if replicated else offer.save_id) for rank in NODES)
    }
    assert (decision.step if decision else None) == max(possible, default=None)
    if decision is not None and not replicated:
        assert len({source.save_id for source in decision.sources.values()}) == 1
        assert all(source.rank == rank for rank, source in decision.sources.items())
