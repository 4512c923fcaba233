"""Which rehearsed kill is due, here and on other nodes."""

from __future__ import annotations

import pytest

from hyperpod_ext.config.fault_injection import KillFault
from hyperpod_ext.runtime.fault_injection.from_agent import KillOnce


def test_each_kill_is_due_once() -> None:
    kills = KillOnce([KillFault(rank=1, step=3), KillFault(node=0, step=4)])
    assert not kills.due(1, 2)
    assert kills.due(1, 3)
    assert not kills.due(1, 3)
    assert not kills.due(0, 4)
    assert kills.due_node(0, 4)
    assert not kills.due_node(0, 4)


def test_what_has_happened_on_another_node_is_spent_here_too() -> None:
    kills = KillOnce([KillFault(rank=1, step=3), KillFault(rank=1, step=9)])
    kills.forget(1, 3)
    assert not kills.due(1, 3)
    assert kills.due(1, 9)


@pytest.mark.parametrize("text", ["rank=1", "node=1@step=0", "node=x@step=1", "rank=1,node=1@step=3"])
def test_another_form_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(ValueError, match="rank=R@step=S or node=N@step=S"):
        KillFault.parse(text)


def test_a_kill_has_one_target() -> None:
    assert KillFault.parse("node=1@step=20") == KillFault(node=1, step=20)
    for victims in ({}, {"rank": 1, "node": 1}):
        with pytest.raises(ValueError, match=r"rank and node are both set|has no rank and no node"):
            KillFault(step=3, **victims)
