from __future__ import annotations

from hyperpod_ext.runtime.coordinator.job_run import ADDRESSES_AT_ONCE, Ranks
from hyperpod_ext.runtime.ipc.decision_parts import DecisionParts
from hyperpod_ext.runtime.snapshot.select import Decision, Source, start_fresh

NODES = {rank: rank // 2 for rank in range(8)}


def test_those_who_hold_the_step_hear_the_same_and_those_who_send_it_hear_to_whom() -> None:
    own = {rank: (Source("self", rank, "g1-s5"),) for rank in range(6)}
    lost = {rank: (Source("live", 0, "g1-s5"), Source("live", 2, "g1-s5")) for rank in (6, 7)}
    parts = list(DecisionParts(Decision(5, own | lost), NODES).parts([0, 1, 2, 3, 9]))
    assert [(sorted(part.sources), nodes) for part, nodes in parts] == [
        ([], [2, 9]),
        ([6, 7], [0]),
        ([6, 7], [1]),
        ([6, 7], [3]),
    ]
    assert {(part.step, part.others, part.save_id) for part, _ in parts} == {(5, "self", "g1-s5")}


def test_a_start_from_nothing_is_the_same_for_all() -> None:
    ((part, nodes),) = DecisionParts(start_fresh(NODES), NODES).parts([0, 1, 2, 3])
    assert (part.others, part.sources, nodes) == ("fresh", {}, [0, 1, 2, 3])


def test_every_node_hears_which_tiers_have_the_step() -> None:
    sources = {rank: (Source("self", rank, "g1-s5"),) for rank in range(7)}
    sources[7] = (Source("durable", 7, "g1-s5", url="s3://b/j", folder="f", tier="s3"),)
    parts = {nodes[0]: part for part, nodes in DecisionParts(Decision(5, sources), NODES).parts([0, 3])}
    assert {part.stored for part in parts.values()} == {("s3://b/j",)}
    assert sorted(parts[3].sources) == [7]


def test_a_large_world_is_sent_the_addresses_that_are_new() -> None:
    ranks = Ranks(stores={rank: ("10.0.0.1", rank) for rank in range(ADDRESSES_AT_ONCE + 1)})
    assert ranks.news_of_stores(1) == (0, {})
    ranks.stores[3] = "10.0.0.2", 1
    assert ranks.news_of_stores(2) == (1, {3: ("10.0.0.2", 1)})
    ranks.stores.clear()
    ranks.stores |= {0: ("10.0.0.1", 0), 1: ("10.0.0.1", 1)}
    assert ranks.news_of_stores(3) == (0, ranks.stores)
