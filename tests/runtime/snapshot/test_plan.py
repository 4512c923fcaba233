"""Plans from elsewhere: what reads as one, and what is refused."""

from __future__ import annotations

import json

import pytest

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan, read_plan

ITEM = Item(0, "model.weight", "float32", (4, 4), (2, 0), (2, 4), 0, 64, 32, 128)
PLAN = Plan(["{", ("model",), "{", ("weight",), "T"], (ITEM,), 128)


def with_item(**changes) -> Plan:
    return Plan(PLAN.shape, (ITEM._replace(**changes),), PLAN.nbytes)


def sent(plan: Plan) -> dict:
    return json.loads(json.dumps(plan.to_json()))


def test_a_plan_comes_back_from_json_as_it_was():
    again = read_plan(sent(PLAN), PLAN.digest)
    assert again == PLAN
    assert again.text == PLAN.text


def test_the_digest_tells_plans_apart():
    assert with_item(offsets=(0, 0)).digest != PLAN.digest
    assert Plan(["{", ("model",), "{", ("bias",), "T"], (ITEM,), 128).digest != PLAN.digest


def test_a_plan_that_is_not_the_one_named_is_refused():
    with pytest.raises(CorruptSnapshotError, match="does not have the digest in its manifest"):
        read_plan(sent(with_item(offsets=(0, 0))), PLAN.digest)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "load"}, "type 'load' cannot be read"),
        ({"dtype": "float64"}, "are wrong"),
        ({"start": -64}, "are wrong"),
        ({"data": -32}, "are wrong"),
        ({"start": 96}, "are wrong"),  # behind its own data
        ({"data": 112}, "are wrong"),  # its data goes on behind its archive
        ({"end": 256}, "are wrong"),  # behind the image
        ({"nbytes": 16}, "are wrong"),
        ({"nbytes": -32, "sizes": (-2, 4)}, "are wrong"),
        ({"offsets": (3, 0)}, "are wrong"),  # out of the whole tensor
        ({"offsets": (-1, 0)}, "are wrong"),
        ({"offsets": (2,)}, "are wrong"),
        ({"sizes": (8,)}, "are wrong"),
    ],
)
def test_a_plan_that_would_make_us_read_elsewhere_is_refused(changes, words):
    lying = with_item(**changes)
    with pytest.raises(CorruptSnapshotError, match=f"model.weight: its .*{words}"):
        read_plan(sent(lying), lying.digest)


@pytest.mark.parametrize("missing", ["shape", "items", "nbytes"])
def test_a_plan_without_one_of_its_parts_is_refused(missing):
    document = sent(PLAN)
    del document[missing]
    with pytest.raises(CorruptSnapshotError, match=f"cannot be read: .*{missing}"):
        read_plan(document, PLAN.digest)


@pytest.mark.parametrize("item", [[], ["0"], list(ITEM[:6]), [0, "a", "float32", 4, [0], [4], 0, 0, 16, 16], None])
def test_an_item_that_is_none_is_refused(item):
    with pytest.raises(CorruptSnapshotError, match="cannot be read"):
        read_plan({**sent(PLAN), "items": [item]}, PLAN.digest)
