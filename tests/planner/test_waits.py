"""Waits for a node when no spare is left."""

from __future__ import annotations

import itertools
import math

import pytest

from hyperpod_ext.planner.waits import waits_for_nodes


def test_without_spares_each_failure_waits_for_its_repair() -> None:
    waits = waits_for_nodes(1e-6, 0.0, 4, 0, 1800.0)
    assert waits.node == 1800.0
    assert waits.rack == pytest.approx(1800 * (1 + 1 / 2 + 1 / 3 + 1 / 4))


@pytest.mark.parametrize("spares", [1, 5])
def test_without_racks_waits_are_those_of_erlang(spares: int) -> None:
    load = 1e-3 * 1800
    blocked = (load**spares / math.factorial(spares)) / sum(load**k / math.factorial(k) for k in range(spares + 1))
    assert waits_for_nodes(1e-3, 0.0, 4, spares, 1800.0).node == pytest.approx(blocked * 1800 / (spares + 1))


@pytest.mark.parametrize("rate", [0.0, 1e-9, 1e-3, 10.0, 1e6])
def test_more_spares_never_wait_longer_and_any_rate_is_a_number(rate: float) -> None:
    found = [waits_for_nodes(rate, rate / 10, 4, spares, 1800.0) for spares in (0, 1, 4, 400)]
    for fewer, more in itertools.pairwise(found):
        assert 0.0 <= more.node <= fewer.node
        assert 0.0 <= more.rack <= fewer.rack
