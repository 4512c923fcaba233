"""Mixtures: exact shares, each sample once in its source's epoch, whatever is asked for in whatever parts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.mixing import BLOCK, Mixture, Segment, drawn_before, ids_of_mixture, quotas_of
from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler


def test_shares_are_exact_in_every_block() -> None:
    lengths, weights = (50_000, 700, 3), (0.7, 0.29, 0.01)
    quotas = quotas_of(weights)
    assert sum(quotas) == BLOCK
    ids = ids_of_mixture(np.arange(5 * BLOCK), Segment(0, weights, (0, 0, 0)), lengths, "global", 1)
    sources = np.searchsorted(np.cumsum(lengths), ids, side="right").reshape(5, BLOCK)
    assert [tuple(np.bincount(row, minlength=3).tolist()) for row in sources] == [quotas] * 5


def test_each_sample_comes_once_before_any_comes_again() -> None:
    lengths = (1000, 77)
    ids = ids_of_mixture(np.arange(3 * BLOCK), Segment(0, (3.0, 1.0), (0, 0)), lengths, "global", 1)
    for source, length in enumerate(lengths):
        first = sum(lengths[:source])
        mine = ids[(ids >= first) & (ids < first + length)] - first
        for epoch in range(len(mine) // length):
            assert sorted(mine[epoch * length : (epoch + 1) * length]) == [*range(length)]
        assert len(mine) // length >= 9


def test_a_source_comes_in_another_order_each_time() -> None:
    ids = ids_of_mixture(np.arange(2 * BLOCK), Segment(0, (3.0, 1.0), (0, 0)), (1000, 77), "global", 1)
    mine = ids[ids < 1000]
    assert mine[:1000].tolist() != mine[1000:2000].tolist()


def test_parts_make_the_whole() -> None:
    segment = Segment(100, (1.0, 2.0), (30, 70))
    whole = ids_of_mixture(np.arange(100, 9000), segment, (500, 600), "global", 1)
    cuts = [100, 101, 4195, 4196, 4197, 8999, 9000]
    parts = [ids_of_mixture(np.arange(a, b), segment, (500, 600), "global", 1) for a, b in pairwise(cuts)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_weights_that_change_leave_no_sample_out() -> None:
    mixture = Mixture([range(300), range(500)], [1, 3])
    sampler = ElasticBatchSampler(mixture, global_batch_size=20, micro_batch_size=20, rank=0, world_size=1)
    seen: list[int] = []
    for step in range(60):
        if step in (7, 8, 31):
            sampler.set_weights([step, 10])
        seen += sampler.step()[0].ids
        sampler.ack()
    for first, length in ((0, 300), (300, 500)):
        counts = Counter(one for one in seen if first <= one < first + length)
        assert max(counts.values()) - min(counts[first + one] for one in range(length)) <= 1
    assert sum(drawn_before(sampler.cursor.place, sampler._segment, 0)) == len(seen) == 1200  # type: ignore[arg-type]


def test_a_script_that_asks_for_other_weights_gets_them_and_one_that_does_not_keeps_those_in_use() -> None:
    def sampler(weights: list[float]) -> ElasticBatchSampler:
        mixture = Mixture([range(30), range(50)], weights)
        return ElasticBatchSampler(mixture, global_batch_size=4, micro_batch_size=4, rank=0, world_size=1)

    first = sampler([1, 1])
    first.ack()
    first.set_weights([1, 0])
    state = first.state_dict()
    same, other = sampler([1, 1]), sampler([0, 1])
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert all(one < 30 for one in same.step()[0].ids)
    assert all(one >= 30 for one in other.step()[0].ids)
    assert other.state_dict()["mix"]["drawn"] == state["mix"]["drawn"]


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("nan")], [1e9, 1]])
def test_weights_that_cannot_be_kept_are_refused(weights: list[float]) -> None:
    with pytest.raises(JobFailedError, match="weight"):
        Mixture([range(3)] * len(weights), weights)


def test_a_source_without_samples_is_refused() -> None:
    with pytest.raises(JobFailedError, match="source 1 is empty"):
        Mixture([range(3), range(0)], [1, 1])
