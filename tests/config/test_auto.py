"""`every_steps: auto`: read, written again, and a number for everybody who only counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from hyperpod_ext.config.checkpoint import CheckpointPolicy

KINDS = [{"kind": "memory"}, {"kind": "peer"}, {"kind": "s3", "uri": "s3://bucket/x"}, {"kind": "file", "path": "/x"}]


def policy(*tiers: dict[str, Any]) -> CheckpointPolicy:
    return CheckpointPolicy.model_validate_json(json.dumps({"tiers": tiers}))


@pytest.mark.parametrize("tier", KINDS, ids=lambda tier: tier["kind"])
def test_auto_is_a_number_that_is_written_as_auto(tier: dict[str, Any]) -> None:
    (auto,), (plain,) = policy({**tier, "every_steps": "auto"}).tiers, policy(tier).tiers
    assert auto.auto
    assert not plain.auto
    assert auto.every_steps == plain.every_steps
    assert json.loads(auto.model_dump_json())["every_steps"] == "auto"
    assert isinstance(json.loads(plain.model_dump_json())["every_steps"], int)
    (again,) = CheckpointPolicy.model_validate_json(policy({**tier, "every_steps": "auto"}).model_dump_json()).tiers
    assert again.auto


def test_auto_may_say_how_it_begins() -> None:
    (tier,) = policy({"kind": "file", "path": "/x", "every_steps": "auto", "every_seconds": 30}).durable()
    assert (tier.auto, tier.every_seconds) == (True, 30.0)


def test_other_words_are_no_number() -> None:
    for value in ("Auto", "often", "", 0, 2.5, True):
        with pytest.raises(ValidationError):
            policy({"kind": "memory", "every_steps": value})


def test_another_interval_of_memory_leaves_the_rest_as_it_is() -> None:
    both = policy({"kind": "memory", "every_steps": "auto"}, {"kind": "peer", "every_steps": 6})
    tuned = both.with_memory_every(4)
    assert [step for step in range(1, 13) if tuned.due(step)] == [4, 6, 8, 12]
    assert tuned.next_due(9) == 12
    assert both.due(1)


def test_what_is_due_is_counted_as_before() -> None:
    both = policy({"kind": "memory", "every_steps": "auto"}, {"kind": "peer", "every_steps": "auto"})
    assert both.due(7)
    assert both.next_due(3) == 3
