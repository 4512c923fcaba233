"""What a job may expect, by how it is protected."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.checkpoint.s3 import S3Tier
from hyperpod_ext.planner.costs import Speeds, Spread, catalogued, group_size, memory_per_node
from hyperpod_ext.planner.estimate import look_ahead, without_each
from hyperpod_ext.planner.presets import preset
from hyperpod_ext.planner.rates import Rates, published
from hyperpod_ext.planner.recovery_tiers import (
    Recovery,
    Scenario,
    chance_together,
    costs_of,
    rates_by_tier,
    recovery_costs,
    tier_of,
)
from hyperpod_ext.planner.state import FORMATS, size_of

ALL = frozenset({"memory", "peer", "durable"})
S3 = S3Tier(uri="s3://bucket/x")


def spread(nodes: int = 64, per_copy: int | None = None) -> Spread:
    nbytes = size_of(preset("llama3-70b"), FORMATS["mixed"]).nbytes
    return Spread(nbytes, nodes, 8, per_copy or nodes * 8)


def scenario(nodes: int = 64, per_copy: int | None = None, tiers: frozenset[str] = ALL) -> Scenario:
    rates = published("llama3-405b").of_job(nodes)
    return Scenario(spread(nodes, per_copy), 5.0, rates, tiers)


def test_each_class_of_failure_falls_back_to_the_nearest_tier_that_survives_it() -> None:
    sharded, replicated = scenario(), scenario(per_copy=64)
    assert [tier_of(one, sharded) for one in ("process", "node", "correlated")] == ["memory", "peer", "durable"]
    assert [tier_of(one, replicated) for one in ("process", "node", "correlated")] == ["live", "live", "durable"]
    known = replace(sharded, domains=True)
    assert tier_of("correlated", known) == "peer"
    assert tier_of("node", replace(sharded, tiers=frozenset({"memory"}))) == "nothing"
    assert tier_of("process", replace(replicated, in_process=False)) == "durable"
    assert tier_of("node", scenario(nodes=1)) == "durable"


def test_a_nodes_disk_survives_its_processes_and_not_the_node() -> None:
    both = frozenset({"disk", "durable"})
    sharded, replicated = scenario(tiers=both), replace(scenario(per_copy=64, tiers=both), in_process=False)
    assert [tier_of(one, sharded) for one in ("process", "node", "correlated")] == ["disk", "durable", "durable"]
    assert [tier_of(one, replicated) for one in ("process", "node")] == ["disk", "disk"]  # other nodes have the same
    assert tier_of("process", replace(sharded, tiers=both | {"memory"})) == "memory"
    assert tier_of("process", replace(sharded, tiers=both | {"memory"}, in_process=False)) == "disk"
    costs = costs_of(sharded)
    assert costs["disk"].read_s == pytest.approx(sharded.spread.node_bytes / 2e9)


def test_frozen_parameters_cost_no_save_but_every_restore() -> None:
    whole = scenario()
    adapters = replace(whole, spread=replace(whole.spread, trained=0.01))
    before, after = costs_of(whole), costs_of(adapters)
    for tier in ("memory", "peer", "disk", "durable"):
        assert after[tier].blocked_s == pytest.approx(before[tier].blocked_s * 0.01)
        assert after[tier].latency_s == pytest.approx(before[tier].latency_s * 0.01)
        assert after[tier].read_s == before[tier].read_s
    with pytest.raises(ValueError, match="the share must be above 0 and at most 1"):
        replace(whole.spread, trained=0)


def test_the_rates_of_all_tiers_add_up_to_those_of_the_job() -> None:
    by_tier = rates_by_tier(scenario())
    classes = [rate for rates in by_tier.values() for name, rate in rates.items() if name != "second loss"]
    assert sum(classes) == pytest.approx(scenario().rates.total)
    assert 0 < by_tier["durable"]["second loss"] < 1e-3 * by_tier["peer"]["node"]


def test_a_rack_takes_a_node_with_all_its_copies_the_less_often_the_more_nodes_there_are() -> None:
    """16 pairs of 2,016 lie in one rack of 4 by chance; nobody has put them apart."""
    assert chance_together(scenario(64)) == pytest.approx(32 * 6 / 2016)
    assert chance_together(scenario(16384)) == 0.03, "spares that come together hold each other's copies"
    assert chance_together(replace(scenario(64), rack_nodes=1)) == 0
    assert chance_together(replace(scenario(4), rack_nodes=8)) == 1
    assert chance_together(replace(scenario(8), replicas=2)) == pytest.approx(8 / 3 * 4 / 56)
    assert chance_together(scenario(64, per_copy=64)) == 0, "eight copies, one of them on other racks"
    rates = rates_by_tier(scenario(64))
    share = rates["durable"]["correlated"] / scenario(64).rates.correlated
    assert share == pytest.approx(chance_together(scenario(64)))
    assert rates_by_tier(replace(scenario(64), domains=True))["peer"]["correlated"] == scenario(64).rates.correlated
    assert "correlated" not in rates_by_tier(scenario(64, tiers=frozenset({"durable"}))).get("peer", {})


def test_memory_of_a_node_is_slots_and_replicas() -> None:
    """Llama 3 70B with 14 bytes a parameter on 16 nodes: 61.7 GB a node, four times that with 2 slots and 2 copies."""
    one = spread(16)
    assert one.node_bytes / 1e9 == pytest.approx(61.7, abs=0.05)
    two_slots = memory_per_node(one, CheckpointPolicy(tiers=(MemoryTier(),)))
    assert two_slots == 2 * one.node_bytes
    everything = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(), S3))
    assert memory_per_node(one, everything) == (2 + 2 + 1 + 2) * one.node_bytes
    assert memory_per_node(spread(16, per_copy=8), everything) == 5 * spread(16, per_copy=8).node_bytes


def test_parity_takes_a_share_of_a_copy_and_is_read_from_all_others() -> None:
    """16 nodes in groups of 8: a seventh of a copy, sent once, rebuilt from seven."""
    one = spread(16)
    parity = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(parity=8), S3))
    assert memory_per_node(one, parity) == pytest.approx((2 + 2 + 1 + 2 / 7) * one.node_bytes)
    copies, by_parity = scenario(16), replace(scenario(16), parity=8)
    of_copies, of_parity = costs_of(copies)["peer"], costs_of(by_parity)["peer"]
    assert (of_parity.blocked_s, of_parity.latency_s) == (of_copies.blocked_s, of_copies.latency_s)
    assert of_parity.read_s == pytest.approx(7 * of_copies.read_s)
    second = [rates_by_tier(each)["durable"]["second loss"] for each in (copies, by_parity)]
    assert second[1] == pytest.approx(7 * second[0])
    assert [group_size(nodes, 8) for nodes in (8, 15, 16, 23, 24)] == [8, 15, 8, 12, 8]


def test_what_is_protected_better_keeps_more_of_its_time() -> None:
    kept = {name: one.goodput for name, one in without_each(scenario(2048)).items()}
    assert max(kept, key=kept.__getitem__) == "as planned"
    assert kept["every fault restarts the job"] < kept["checkpoints in storage alone"] < kept["as planned"]
    assert kept["without copies on peers"] < kept["as planned"]


def test_the_best_intervals_are_better_than_others() -> None:
    best = look_ahead(scenario())
    assert list(best.every()) == ["memory", "peer", "durable"]
    for factor in (0.5, 2.0):
        other = {kind: max(1, int(factor * steps)) for kind, steps in best.every().items()}
        assert look_ahead(scenario(), other).goodput < best.goodput


def test_dollars_are_those_of_the_time_that_is_lost() -> None:
    estimate = look_ahead(scenario())
    dollars = estimate.dollars(100.0)
    assert dollars["a_month"] == pytest.approx((1 - estimate.goodput) * 73_000, abs=0.01)
    assert dollars["a_failure"] * estimate.failures_a_month == pytest.approx(dollars["a_month"], rel=1e-3)
    assert estimate.to_json(100.0)["usd_lost"] == dollars


def test_nothing_that_fails_costs_nothing_and_needs_no_save() -> None:
    calm = replace(scenario(), rates=Rates(0.0, 0.0, 0.0, "given"))
    estimate = look_ahead(calm)
    run = calm.run_s / calm.step_s
    assert {round(run / steps) for steps in estimate.every().values()} == {1}  # one, at the end
    assert estimate.dollars(100.0)["a_failure"] == 0.0
    assert estimate.goodput == pytest.approx(1.0, abs=1e-3)


def test_an_interval_longer_than_the_run_is_the_run() -> None:
    short = replace(scenario(), run_s=500.0)
    assert look_ahead(short, {"memory": 10**9, "peer": 10**9, "durable": 10**9}).every() == dict.fromkeys(ALL, 100)
    assert max(look_ahead(short).every().values()) <= 100


def test_without_any_tier_the_run_must_survive_as_a_whole() -> None:
    bare = look_ahead(scenario(tiers=frozenset()))
    assert [tier.kind for tier in bare.tiers] == ["nothing"]
    assert bare.goodput < 0.01


RATE = st.just(0.0) | st.floats(1e-15, 1e-3)
"""Never, or from once in thirty million years to once in a quarter of an hour."""


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 16, 2048]), st.booleans(), st.sets(st.sampled_from(sorted(ALL))), RATE,
    RATE, st.floats(1e-3, 1e3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_whatever_fails_how_often_the_answer_is_a_number(
    nodes: int, replicated: bool, tiers: set[str], process: float, node: float, step_s: float, here: bool, known: bool
) -> None:
    rates = Rates(process, node, node / 10, "given")
    one = Scenario(
        spread(nodes, 8 if replicated else None), step_s, rates, frozenset(tiers), in_process=here, domains=known,
        recovery=Recovery(1.0, 10.0, 100.0),
    )  # fmt: skip
    estimate = look_ahead(one)
    assert 0 <= estimate.goodput <= 1
    assert all(math.isfinite(tier.lost_steps) for tier in estimate.tiers)
    every = [tier.every_steps for tier in estimate.tiers if tier.every_steps is not None]
    assert all(far % near == 0 for near, far in itertools.pairwise(every))
    assert set(recovery_costs(one)) == {tier.kind for tier in estimate.tiers}


def test_speeds_follow_from_the_machine_and_say_so() -> None:
    policy = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(streams=4)))
    fast, slow = catalogued(instance("ml.p5.48xlarge"), policy), catalogued(instance("ml.c5.12xlarge"), policy)
    assert fast.peer == 4 * 5e9 / 8
    assert slow.peer == 12e9 / 8
    assert "ml.c5.12xlarge (12 Gigabit)" in slow.source
    assert catalogued(None, policy).source.startswith("assumed")


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        replace(scenario(), step_s=0.0)
    with pytest.raises(ValueError, match="durable: 0"):
        Speeds(durable=0.0)
    with pytest.raises(ValueError, match="does not divide a world of 512"):
        spread(64, per_copy=100)
