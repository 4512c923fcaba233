"""Scales, batch policy and learning rates: arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hyperpod_ext.config.elastic import BatchPolicy, Elastic, ScaleConfig, batch_at
from hyperpod_ext.config.scales import discrete_values, plan_scales, sizes_of
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.schedule import learning_rate


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "percent"),
    [(1024, 1, 96, 97), (1024, 1, 48, 97), (1024, 4, 96, 89), (960, 1, 96, 100), (960, 4, 96, 83)],
)
def test_efficiency_is_the_share_of_micro_batches_that_count(batch: int, micro: int, ranks: int, percent: int) -> None:
    (scale,) = plan_scales(batch, micro, [ranks])
    assert round(scale.efficiency * 100) == percent
    assert scale.micro_batches + scale.ghosts == scale.micro_batches_per_rank * ranks


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 40), st.integers(1, 8))
def test_discrete_values_are_those_that_are_efficient(slots: int, micro: int, most: int, workers: int) -> None:
    scales = plan_scales(slots * micro, micro, range(1, most + 1), workers_per_node=workers)
    assert [scale.nodes for scale in scales] == [*range(1, most + 1)]
    good = discrete_values(scales, 0.9)
    assert good == tuple(scale.nodes for scale in scales if scale.micro_batches * 10 >= 9 * (scale.ghosts + slots))
    assert all(0 < scale.efficiency <= 1 for scale in scales)


def test_nodes_without_a_whole_copy_of_the_model_are_left_out() -> None:
    scales = plan_scales(64, 1, range(1, 9), workers_per_node=8, ranks_per_copy=16)
    assert [(scale.nodes, scale.ranks) for scale in scales] == [(2, 1), (4, 2), (6, 3), (8, 4)]


def test_sizes_are_those_of_the_spec() -> None:
    assert sizes_of(Elastic(min_nodes=2, max_nodes=8, step=3)) == (2, 5, 8)
    assert sizes_of(Elastic(min_nodes=2, max_nodes=8, sizes=(2, 4, 8))) == (2, 4, 8)


@pytest.mark.parametrize(("rule", "factor"), [("constant", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_batch_by_the_rule(rule: str, factor: float) -> None:
    policy = BatchPolicy(
        micro_batch_size=4,
        learning_rate=rule,  # type: ignore[arg-type]
        scale_config=(ScaleConfig(nodes=8, global_batch_size=256), ScaleConfig(nodes=9, learning_rate_factor=3.0)),
    )
    assert batch_at(policy, 8, 64).learning_rate_factor == factor
    assert batch_at(policy, 2, 64) == batch_at(policy, 4, 64)
    assert batch_at(policy, 2, 64).learning_rate_factor == 1.0
    assert batch_at(policy, 9, 64).learning_rate_factor == 3.0


def test_a_policy_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^global_batch_size 64 is not a multiple of micro_batch_size 5"):
        batch_at(BatchPolicy(micro_batch_size=5), 3, 64)
    with pytest.raises(ValidationError, match="two entries for the same number of nodes"):
        BatchPolicy(scale_config=(ScaleConfig(nodes=2), ScaleConfig(nodes=2)))


def test_learning_rates_rise_then_fall() -> None:
    rates = [learning_rate(step, peak=1.0, total_steps=110, warmup_steps=10, final=0.1) for step in range(1, 121)]
    assert rates[:10] == [pytest.approx(step / 10) for step in range(1, 11)]
    assert rates[59] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert all(a > b for a, b in pairwise(rates[9:110]))
    assert rates[109:] == [pytest.approx(0.1)] * 11
    assert learning_rate(60, peak=1.0, total_steps=110, warmup_steps=10, shape="linear") == pytest.approx(0.5)
    assert learning_rate(60, peak=1.0, total_steps=110, warmup_steps=10, shape="constant") == 1.0
    assert learning_rate(5, peak=1.0, total_steps=5, warmup_steps=5) == 1.0


@pytest.mark.parametrize("bad", [{"step": 0}, {"warmup_steps": 11}, {"shape": "cos"}])
def test_a_schedule_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    given = {"step": 1, "peak": 1.0, "total_steps": 10} | bad
    with pytest.raises(JobFailedError, match="learning_rate: an argument is not valid"):
        learning_rate(**given)  # type: ignore[arg-type]
