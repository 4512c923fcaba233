"""The one decision that must never be wrong: which step, and whose bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.select import (
    Decision,
    Offer,
    Source,
    began_on_disk,
    choose_step,
    place_of,
    start_fresh,
)
from hyperpod_ext.runtime.snapshot.sharing import Sharing

NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def live(rank: int, step: int, own: str = "", generation: int = 1, sharing: str = "same") -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g{generation}-s{step}", own, sharing)


def memory(rank: int, step: int, own: str = "", generation: int = 1, sharing: str = "same", **more) -> Offer:
    node = more.pop("node", NODES.get(rank, 0))
    return Offer("memory", step, rank, node, f"g{generation}-s{step}", own, sharing, **more)


def durable(step: int, tier: str = "s3", generation: int = 1, world_size: int = 4) -> Offer:
    place = {"url": f"{tier}://place/j", "folder": f"step-{step}-g{generation}"}
    return Offer("durable", step, -1, -1, f"g{generation}-s{step}", world_size=world_size, name=tier, **place)


def chosen(offers: list[Offer], nodes=NODES, began=None) -> Decision:
    decision = choose_step(offers, nodes, began)
    assert decision is not None
    return decision


def kinds(decision: Decision) -> dict[int, str]:
    return {rank: source.name for rank in decision.sources for source in decision.sources[rank]}


def test_nothing_held_anywhere_is_no_decision():
    assert choose_step([], NODES) is None


def test_a_decision_survives_the_wire():
    decision = chosen([live(0, 8), live(1, 8), memory(2, 8), live(3, 8)])
    assert Decision.from_json(decision.to_json()) == decision
    resized = chosen([durable(8, world_size=2)])
    assert Decision.from_json(resized.to_json()) == resized
    assert start_fresh(NODES).step == 0


# --- where each rank gets it ----------------------------------------------------------------------


def test_survivors_keep_what_they_have_and_the_joining_node_takes_its_own_snapshot():
    decision = chosen([live(0, 7), live(1, 7), live(3, 7), memory(2, 7), memory(2, 6)])
    assert decision.step == 7
    assert kinds(decision) == {0: "self", 1: "self", 2: "memory", 3: "self"}


def test_without_its_own_snapshot_the_joining_node_takes_a_live_peer_on_its_node():
    decision = chosen([live(0, 7), live(1, 7), live(3, 7), memory(2, 6)])
    assert decision.sources[2] == tuple(Source("live", rank, "g1-s7") for rank in (3, 0, 1))


def test_a_laggard_rolls_forward_and_nobody_rolls_back():
    decision = chosen([live(0, 8), live(1, 7), live(3, 8)])
    assert decision.step == 8
    assert decision.sources[1] == tuple(Source("live", rank, "g1-s8") for rank in (0, 3))


def test_a_lost_node_is_restored_from_its_replicas_in_another_nodes_memory():
    offers = [memory(rank, 7, own=f"own{rank}", sharing="shard", node=0) for rank in NODES]
    decision = chosen(offers)
    assert kinds(decision) == {0: "memory", 1: "memory", 2: "peer", 3: "peer"}
    assert decision.sources[2] == (Source("peer", 2, "g1-s7", node=0),)


def test_a_replica_on_the_own_node_is_nearer_than_another_nodes_memory():
    offers = [memory(rank, 7, own=f"own{rank}", node=node) for rank in NODES for node in (0, 1)]
    assert set(kinds(chosen(offers)).values()) == {"memory"}


def test_places_are_tried_from_the_nearest_to_the_farthest():
    places = [durable(7, "s3"), durable(7, "file"), *(memory(rank, 7, node=9) for rank in NODES)]
    places += [live(1, 7), memory(0, 7), live(0, 7)]
    seen = []
    for count in range(1, len(places) + 1):
        source = chosen(places[:count]).source(0)
        if not seen or seen[-1] != source.name:
            seen.append(source.name)
    assert seen == ["s3", "file", "peer", "live", "memory", "self"]


def test_load_spreads_over_equals():
    offers = [memory(rank, 7, node=9) for rank in range(4)]
    assert [chosen(offers).source(rank).rank for rank in NODES] == [0, 1, 2, 3]


# --- durable checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["file", "s3"])
def test_a_durable_checkpoint_serves_every_rank_when_memory_has_nothing(tier):
    decision = chosen([durable(100, tier), durable(90, tier)])
    assert decision.step == 100
    assert decision.sources == {
        rank: (Source("durable", rank, "g1-s100", url=f"{tier}://place/j", folder="step-100-g1", tier=tier),)
        for rank in NODES
    }


def test_a_durable_checkpoint_that_is_newer_than_memory_is_preferred():
    assert chosen([*(memory(rank, 90) for rank in NODES), durable(100)]).step == 100


def test_memory_that_is_newer_than_the_durable_checkpoint_is_preferred():
    decision = chosen([*(memory(rank, 110) for rank in NODES), durable(100)])
    assert decision.step == 110
    assert set(kinds(decision).values()) == {"memory"}


def test_of_one_commit_each_rank_takes_what_is_nearest_to_it():
    """Node 1 is new: its ranks read from S3 what the others still have in memory."""
    decision = chosen(
        [memory(0, 100, own="a", sharing="shard"), memory(1, 100, own="b", sharing="shard"), durable(100)]
    )
    assert kinds(decision) == {0: "memory", 1: "memory", 2: "s3", 3: "s3"}


def test_a_durable_checkpoint_of_another_commit_cannot_fill_the_gap():
    offers = [memory(0, 100, own="a", generation=2), memory(1, 100, own="b", generation=2), durable(100)]
    decision = chosen(offers)
    assert {source.save_id for (source,) in decision.sources.values()} == {"g1-s100"}


# --- another world size ---------------------------------------------------------------------------


def test_another_world_size_gives_every_rank_the_places_of_all_old_ranks():
    decision = chosen([durable(100, world_size=3)])
    for sources in decision.sources.values():
        assert [(source.name, source.rank) for source in sources] == [("s3", 0), ("s3", 1), ("s3", 2)]


def test_a_checkpoint_of_this_world_size_is_preferred_at_one_commit():
    decision = chosen([durable(100, "file", world_size=8), durable(100, "s3", world_size=4)])
    assert decision.sources[2] == (
        Source("durable", 2, "g1-s100", url="s3://place/j", folder="step-100-g1", tier="s3"),
    )


def test_memory_of_another_world_size_serves_when_all_of_it_is_there():
    of_two = [memory(rank, 100, own=f"own{rank}", sharing="shard", world_size=2, node=rank) for rank in (0, 1)]
    decision = chosen(of_two)
    assert [(source.kind, source.rank) for source in decision.sources[3]] == [("peer", 0), ("memory", 1)]
    assert choose_step(of_two[:1], NODES) is None


def test_replicated_state_of_another_world_size_is_read_once():
    of_two = [memory(rank, 100, world_size=2, node=rank) for rank in (0, 1)]
    assert all(len(sources) == 1 for sources in chosen(of_two).sources.values())


# --- whose state serves whom ----------------------------------------------------------------------


def test_state_that_is_each_ranks_own_is_never_taken_from_another_rank():
    """Rank 2 finished no step 8 that is still held, so step 8 cannot be had, however many others have it."""
    offers = [live(rank, 8, own=f"own{rank}") for rank in (0, 1, 3)]
    offers += [memory(rank, 7, own=f"own{rank}") for rank in NODES]
    decision = chosen(offers)
    assert decision.step == 7
    assert all(source.rank == rank for rank, (source,) in decision.sources.items())


def test_a_shard_is_never_taken_from_another_rank_even_when_nothing_else_tells_them_apart():
    assert choose_step([live(rank, 8, sharing="shard") for rank in (0, 1, 3)], NODES) is None


def test_one_rank_alone_does_not_show_that_buffers_agree():
    assert choose_step([live(0, 8, own="x", sharing="alike")], NODES) is None


def test_two_ranks_that_agree_show_that_buffers_do():
    decision = chosen([live(0, 8, own="x", sharing="alike"), live(3, 8, own="x", sharing="alike")])
    assert kinds(decision) == {0: "self", 1: "live", 2: "live", 3: "self"}


def test_ranks_that_differed_at_any_step_are_not_taken_to_agree_at_another():
    offers = [live(0, 8, own="x", sharing="alike"), live(3, 8, own="x", sharing="alike")]
    offers += [memory(0, 7, own="x", sharing="alike"), memory(1, 7, own="y", sharing="alike")]
    assert choose_step(offers, NODES) is None


def test_contents_that_differ_although_digests_agree_are_not_interchangeable():
    offers = [memory(0, 8, content="aa"), memory(1, 8, content="bb")]
    assert choose_step(offers, NODES) is None
    assert chosen([memory(0, 8, content="aa"), memory(1, 8, content="aa")]).step == 8


def test_an_hsdp_shard_comes_live_from_the_rank_that_holds_the_same_one():
    offers = [live(0, 8, own="a", sharing="same:0,2"), live(1, 8, own="b", sharing="same:1,3")]
    decision = chosen([*offers, live(3, 8, own="b", sharing="same:1,3"), memory(2, 7, own="a", sharing="same:0,2")])
    assert decision.step == 8
    assert decision.sources[2] == (Source("live", 0, "g1-s8"),)


def test_both_ranks_of_an_hsdp_shard_lost_go_back_to_what_memory_has():
    offers = [live(1, 8, sharing="same:1,3"), live(3, 8, sharing="same:1,3")]
    offers += [memory(rank, 7, sharing=f"same:{rank % 2},{rank % 2 + 2}") for rank in NODES]
    decision = chosen(offers)
    assert decision.step == 7
    assert kinds(decision) == dict.fromkeys(NODES, "memory")


def test_replicas_that_differ_serve_nobody_but_themselves():
    offers = [live(0, 8, own="a", sharing="alike:0,2"), live(1, 8, sharing="alike:1,3")]
    offers += [live(3, 8, sharing="alike:1,3")]
    assert choose_step(offers, NODES) is None  # of rank 2's part only rank 0 speaks
    assert chosen([*offers, memory(2, 8, own="a", sharing="alike:0,2")]).step == 8
    apart = [memory(0, 7, own="x", sharing="same:0,2"), memory(2, 7, own="y", sharing="same:0,2")]
    offers = [live(rank, 8, sharing=f"same:{rank % 2},{rank % 2 + 2}") for rank in (0, 1, 3)]
    assert choose_step([*offers, *apart], NODES) is None
    assert chosen(offers).step == 8


def test_a_word_for_sharing_that_means_nothing_is_refused():
    with pytest.raises(JobFailedError, match="for the sharing of state; valid are"):
        choose_step([live(0, 8, sharing="same:0,x")], NODES)


def test_one_rank_alone_shares_with_nobody_and_all_ranks_need_not_be_named():
    assert str(Sharing.among("same", {3}, 4)) == "shard"
    assert str(Sharing.among("same", {1, 3}, 4)) == "same:1,3"
    assert str(Sharing.among("alike", range(4), 4)) == str(Sharing.among("alike", None, 4)) == "alike"


# --- commits and generations ----------------------------------------------------------------------


def test_parts_of_one_state_are_of_one_commit():
    """Step 7 was made in two generations; no generation's copy is whole, so step 6 it is."""
    offers = [memory(rank, 7, own=str(rank), generation=1 + rank % 2) for rank in NODES]
    offers += [memory(rank, 6, own=str(rank)) for rank in NODES]
    assert chosen(offers).step == 6


def test_of_two_commits_of_one_step_the_later_generations_counts():
    decision = chosen([memory(rank, 7, generation=g, own=str(rank)) for rank in NODES for g in (9, 10)])
    assert {source.save_id for (source,) in decision.sources.values()} == {"g10-s7"}


def test_steps_that_a_later_generation_gave_up_are_not_chosen():
    """Generation 2 began at step 5: what generation 1 did after that is another history."""
    offers = [memory(rank, step) for rank in NODES for step in (5, 9)] + [durable(100)]
    assert chosen(offers, began={1: 0, 2: 5}).step == 5
    assert chosen(offers, began={1: 0}).step == 100


def test_what_the_same_generation_did_after_it_began_is_chosen():
    assert chosen([memory(rank, 9, generation=2) for rank in NODES], began={1: 0, 2: 5}).step == 9


# --- against brute force --------------------------------------------------------------------------


@st.composite
def offers_of_jobs(draw) -> list[Offer]:
    """Anything that memory servers, workers and durable tiers of a small job may say."""
    sharing = draw(st.sampled_from(["same", "alike", "shard"]))

    def held(is_live: bool, step: int, rank: int, node: int, own: str, generation: int, content: str) -> Offer:
        if is_live:
            return live(rank, step, own, generation, sharing)
        return memory(rank, step, own, generation, sharing, node=node, content=content)

    owns = st.sampled_from(["", "", "a"])
    numbers = {"step": st.integers(0, 4), "rank": st.integers(0, 3), "node": st.integers(0, 2)}
    more = {"own": owns, "generation": st.integers(1, 2), "content": st.sampled_from(["", "", "", "c", "d"])}
    each = draw(st.lists(st.builds(held, is_live=st.booleans(), **numbers, **more), max_size=24))
    whole = st.builds(durable, st.integers(0, 4), st.sampled_from(["file", "s3"]), st.integers(1, 2))
    return each + draw(st.lists(whole, max_size=2))


@given(offers_of_jobs(), st.dictionaries(st.integers(1, 3), st.integers(0, 4), max_size=3))
def test_every_decision_is_whole_and_the_newest_there_is(offers: list[Offer], began: dict[int, int]):
    def generation(offer: Offer) -> int:
        return int(offer.save_id[1])

    alive = [o for o in offers if not any(g > generation(o) and o.step > step for g, step in began.items())]
    each = [o for o in alive if o.rank >= 0]
    differ = any(
        a.save_id == b.save_id
        and (a.own_digest != b.own_digest or (a.content and b.content and a.content != b.content))
        for a in each
        for b in each
    )

    def serves(commit: list[Offer], rank: int) -> bool:
        ranks = {o.rank for o in commit if o.rank >= 0}
        kind = {o.sharing for o in commit if o.rank >= 0}
        enough = (kind == {"same"} and ranks) or (kind == {"alike"} and len(ranks) > 1)
        return rank in ranks or any(o.rank < 0 for o in commit) or bool(enough and not differ)

    commits: dict[tuple[int, int], list[Offer]] = {}
    for offer in alive:
        commits.setdefault((offer.step, generation(offer)), []).append(offer)
    possible = [key for key, commit in commits.items() if all(serves(commit, rank) for rank in NODES)]

    decision = choose_step(offers, NODES, began)
    if decision is None:
        assert not possible
        return
    step, newest = max(possible)
    assert decision.step == step
    for rank, (source, *others) in decision.sources.items():
        assert {other.kind for other in others} <= {"live"}
        assert source.save_id == f"g{newest}-s{step}"
        given_by = [o for o in commits[step, newest] if o.rank in (source.rank, -1)]
        match source.kind:
            case "self":
                assert source.rank == rank
                assert any(o.tier == "live" for o in given_by)
            case "live":
                assert any(o.tier == "live" and o.rank == source.rank for o in given_by)
            case "memory" | "peer":
                assert any(o.tier == "memory" and o.node == source.node for o in given_by)
                assert (source.kind == "memory") == (source.node == NODES[rank])
            case _:
                assert source.rank == rank
                assert any((o.tier, o.url, o.folder) == (source.kind, source.url, source.folder) for o in given_by)
        if source.rank != rank:
            assert not differ
            assert all(o.sharing != "shard" for o in given_by)


# --- parity ---------------------------------------------------------------------------------------

GROUPS = ((0, 1, 2), (3, 4, 5, 6))
"""Nodes, each with two ranks, so four stripes."""
SEVEN = {rank: rank // 2 for rank in range(14)}


def stripe_of(rank: int) -> tuple[int, ...]:
    return next(tuple(2 * node + rank % 2 for node in group) for group in GROUPS if rank // 2 in group)


def piece(rank: int, step: int, **more) -> Offer:
    stripe = more.pop("stripe", stripe_of(rank))
    return Offer("parity", step, rank, SEVEN[rank], f"g1-s{step}", sharing="shard", world_size=14, stripe=stripe)


def held_with_parity(step: int, lost: set[int]) -> list[Offer]:
    """What is left where these nodes are lost."""
    ranks = [rank for rank, node in SEVEN.items() if node not in lost]
    images = [memory(rank, step, str(rank), node=SEVEN[rank], sharing="shard", world_size=14) for rank in ranks]
    return images + [piece(rank, step) for rank in ranks]


@given(st.sets(st.integers(0, 6), max_size=7))
def test_a_step_is_there_as_long_as_no_group_has_lost_two_nodes(lost):
    older = [durable(4, world_size=14)]
    decision = chosen(held_with_parity(8, lost) + older, SEVEN)
    if any(len(lost & set(group)) > 1 for group in GROUPS):
        assert decision.step == 4
        return
    assert decision.step == 8
    for rank, node in SEVEN.items():
        kind = "parity" if node in lost else "memory"
        assert {source.kind for source in decision.sources[rank]} == {kind}
        if node in lost:
            assert [source.rank for source in decision.sources[rank]] == [r for r in stripe_of(rank) if r != rank]
            assert [source.node for source in decision.sources[rank]] == [
                SEVEN[r] for r in stripe_of(rank) if r != rank
            ]
    assert Decision.from_json(decision.to_json()) == decision


def test_a_piece_that_is_not_whole_rebuilds_nothing():
    offers = [one for one in held_with_parity(8, {1}) if one.key != piece(4, 8).key]
    assert choose_step(offers, SEVEN) is None
    other = piece(4, 8, stripe=(2, 4, 6))  # of a group of before
    assert choose_step([*offers, other], SEVEN) is None


def test_a_piece_of_another_commit_rebuilds_nothing():
    offers = held_with_parity(8, {1})
    assert chosen(offers + held_with_parity(7, set()), SEVEN).step == 8
    mixed = [one for one in offers if one.key != piece(4, 8).key] + [piece(4, 7)]
    assert choose_step(mixed, SEVEN) is None


def test_an_image_on_another_node_than_its_piece_is_not_counted_on():
    offers = [one for one in held_with_parity(8, {1}) if one.tier == "parity" or one.rank != 4]
    assert choose_step([*offers, memory(4, 8, "4", node=6, sharing="shard", world_size=14)], SEVEN) is None


def test_a_copy_comes_before_parity_and_parity_before_a_checkpoint():
    offers = held_with_parity(8, {1})
    copy = memory(2, 8, "2", node=0, sharing="shard", world_size=14)
    assert kinds(chosen([*offers, copy], SEVEN))[2] == "peer"
    assert kinds(chosen([*offers, durable(8, "file", world_size=14)], SEVEN))[2] == "parity"


def test_another_number_of_ranks_is_not_rebuilt():
    assert choose_step(held_with_parity(8, {1}), {rank: rank // 2 for rank in range(12)}) is None


def test_a_refused_source_names_its_piece():
    (first, _) = chosen(held_with_parity(8, {1}), SEVEN).sources[2]
    assert place_of(first, SEVEN) == piece(0, 8).key


# --- disks of nodes -------------------------------------------------------------------------------


def disk(rank: int, step: int, run: str = "now", generation: int = 1, began: int = 0, **more: Any) -> Offer:
    """A rank's snapshot on the disk of its node, of a run of the job; `now` is the one that asks."""
    summary = {"rank": rank, "step": step, "save_id": f"g{generation}-s{step}", "own_digest": f"own{rank}"}
    summary |= {"sharing": "shard", "content": "", "world_size": 4, "tier": "disk", "url": "/nvme/j", "folder": "f"}
    return Offer.of_disk(summary | {"run": run, "began": began} | more, NODES[rank], "now")


def test_the_disk_of_its_node_is_nearer_than_memory_of_another_and_that_nearer_than_anothers_disk():
    near, far = disk(0, 7, sharing="same", own_digest=""), disk(2, 7, sharing="same", own_digest="")
    places = [durable(7, "file"), far, *(memory(rank, 7, node=9) for rank in NODES), near, live(1, 7)]
    seen = [chosen(places[:count]).source(0).name for count in range(1, len(places) + 1)]
    assert [name for name, _ in itertools.groupby(seen)] == ["file", "disk", "peer", "disk", "live"]
    assert [chosen([one]).source(0).on_another_disk for one in (near, far)] == [False, True]


def test_a_source_on_a_disk_is_refused_as_what_was_offered():
    for rank, offer in ((0, disk(0, 7, sharing="same")), (0, disk(2, 7, sharing="same"))):
        assert place_of(chosen([offer]).source(rank), NODES) == offer.key


def test_shards_on_disks_and_in_memory_of_one_run_make_one_step():
    in_memory = [memory(rank, 7, own=f"own{rank}", sharing="shard") for rank in (0, 1)]
    decision = chosen([*in_memory, disk(2, 7), disk(3, 7), *(disk(rank, 6) for rank in NODES)])
    assert (decision.step, kinds(decision)) == (7, {0: "memory", 1: "memory", 2: "disk", 3: "disk"})


def test_the_same_step_of_two_runs_is_never_mixed():
    """Runs that did not know of each other have numbered generations alike."""
    both = [disk(0, 7, "one"), disk(1, 7, "one"), disk(2, 7, "other"), disk(3, 7, "other")]
    assert choose_step(both, NODES) is None
    assert choose_step([*both[:2], disk(2, 7), disk(3, 7)], NODES) is None
    decision = chosen([*both, *(disk(rank, 5, "other") for rank in NODES)])
    assert decision.step == 5
    assert {source.save_id for (source,) in decision.sources.values()} == {"g1-s5@other"}


def test_what_a_later_generation_gave_up_is_not_taken_from_a_node_that_was_not_in_it():
    """All ranks hold the same: any disk would do."""
    same = {"sharing": "same", "own_digest": ""}
    given_up, later = disk(2, 9, generation=1, **same), disk(0, 8, generation=2, began=6, **same)
    assert chosen([given_up, later]).step == 9
    assert chosen([given_up, later], began=began_on_disk([given_up, later])).step == 8


def test_a_group_is_not_rebuilt_where_a_shard_is_on_the_nodes_disk():
    stripe = (0, 2)
    pieces = [Offer("parity", 7, rank, NODES[rank], "g1-s7", sharing="shard", stripe=stripe) for rank in stripe]
    others = [memory(rank, 7, own=f"own{rank}", sharing="shard", world_size=4) for rank in (1, 2, 3)]
    assert chosen([*pieces, *others, disk(0, 7)]).source(0).name == "disk"
