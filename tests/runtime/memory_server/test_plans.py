"""How many layouts a memory server keeps."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server import plans as memory
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.snapshot.layout_plan import Plan


def plan(nbytes: int) -> Plan:
    return Plan(["{", ()], (), nbytes)


def add(plans: Plans, nbytes: int) -> str:
    each = plan(nbytes)
    plans.add(each.to_json(), each.digest)
    return each.digest


def test_plans_of_no_snapshot_are_dropped_the_one_used_longest_ago_first() -> None:
    in_use: set[str] = set()
    plans = Plans(lambda: in_use)
    held = add(plans, 1)
    in_use.add(held)
    saving = add(plans, 2)  # the layout of a rank that saves now and then
    unused = [add(plans, 3 + number) for number in range(2 * memory._NEWEST) if plans[saving]]
    assert [plans[held].nbytes, plans[saving].nbytes] == [1, 2]
    assert plans.get(unused[0]) is None
    assert plans.get(unused[-1]) is not None
    assert len(plans._plans) <= memory._NEWEST + 1
    with pytest.raises(NotFoundError, match="is not known here"):
        plans[unused[0]]
