"""Nested state taken apart and put together again."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.tree import fqn, leaf_paths, put_together, take_apart


class Tensor:
    """Stands for a tensor: trees know tensors only by their type."""


class Pair(NamedTuple):
    mean: object
    var: object


class Phase(IntEnum):
    MAIN = 2


class Word(str):
    """Text of a type of its own."""


class Words(list):
    """A list of a type of its own."""


class Named(dict):
    """A dict of a type of its own."""


@dataclass(frozen=True)
class Frozen:
    number: int


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
leaves = scalars | st.builds(Tensor)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_from_json_as_it_was(tree):
    parts = take_apart(tree, Tensor)
    shape, values = json.loads(json.dumps([parts.shape, parts.values]))
    assert put_together(shape, parts.tensors, values) == tree


@given(trees)
def test_each_leaf_has_a_path_that_leads_to_it(tree):
    parts = take_apart(tree, Tensor)
    to_tensors, to_values = leaf_paths(parts.shape)

    def at(path):
        node = tree
        for key in path:
            node = node[key]
        return node

    assert [at(path) for path in to_tensors] == parts.tensors
    assert [list(at(path)) if isinstance(at(path), tuple) else at(path) for path in to_values] == parts.values


def test_a_tuple_and_a_list_and_an_empty_one_of_each_stay_what_they_are():
    tree = {"pair": (1, "a"), "list": [1, [2, 3]], "none": (), "nothing": [], "empty": {}, "deep": ((1, Tensor()),)}
    parts = take_apart(tree, Tensor)
    assert put_together(json.loads(json.dumps(parts.shape)), parts.tensors, parts.values) == tree


def test_keys_keep_their_order_and_whole_numbers_stay_numbers():
    tree = OrderedDict([(2, 1.0), ("10", True), (1, None)])
    parts = take_apart(tree, Tensor)
    again = put_together(json.loads(json.dumps(parts.shape)), parts.tensors, parts.values)
    assert list(again.items()) == [(2, 1.0), ("10", True), (1, None)]


def test_optimizer_state_comes_back_as_it_was():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    parts = take_apart(before, torch.Tensor)
    state = put_together(json.loads(json.dumps(parts.shape)), parts.tensors, parts.values)
    assert state["param_groups"] == before["param_groups"]
    assert state["state"][0]["exp_avg"] is before["state"][0]["exp_avg"]


def test_names_are_those_of_torch_distributed_checkpoint():
    parts = take_apart({"optimizer": {"state": {0: {"exp_avg": Tensor()}}}, "list": [Tensor()]}, Tensor)
    assert [fqn(path) for path in leaf_paths(parts.shape)[0]] == ["optimizer.state.0.exp_avg", "list.0"]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"hooks": [1, lambda: None]}}, r"model\.hooks\.1 is a value of type function"),
        ({"model": {(1, 2): 3}}, r"model\.\(1, 2\) is a dictionary key of type tuple"),
        ({"model": {True: 3}}, r"model\.True is a dictionary key of type bool"),
        ({"model": ({"a": bytearray(b"bytes")},)}, r"model\.0\.a is a value of type bytearray"),
        ({"box": [Pair(1, 2)]}, r"box\.0 is a value of type Pair, which cannot be restored unchanged"),
        ({"box": {"at": Pair(Tensor(), Tensor())}}, r"box\.at is a value of type Pair"),
        ({"box": Phase.MAIN}, r"box is a value of type Phase"),
        ({"box": [Word("a")]}, r"box\.0 is a value of type Word"),
        ({"box": (Words(["a"]),)}, r"box\.0 is a value of type Words"),
        ({"box": Named(a=1)}, r"box is a value of type Named"),
        ({"box": MappingProxyType({"a": 1})}, r"box is a value of type mappingproxy"),
        ({"box": {"a": defaultdict(lambda: 0)}}, r"box\.a is a value of type defaultdict"),
        ({"box": {1, 2}}, r"box is a value of type set"),
        ({"box": deque([1])}, r"box is a value of type deque"),
        ({"box": Frozen(1)}, r"box is a value of type Frozen"),
        ({"box": numpy.longdouble(1)}, r"box is a value of type longdouble"),
        ({"box": numpy.complex64(1)}, r"box is a value of type complex64"),
        ({"box": numpy.arange(3)}, r"box is a value of type ndarray"),
        ({"box": torch.float16}, r"box is a value of type dtype"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_path(tree, words):
    with pytest.raises(JobFailedError, match=words):
        take_apart(tree, Tensor)


OF_OTHER_TYPES = (
    OrderedDict([(2, 1.0), ("b", [1])]),
    Counter({30: 1, 80: 2}),
    defaultdict(list, {"a": [3]}),
    defaultdict(None, {"a": 1}),
    torch.Size([2, 3]),
    torch.Size([]),
    1 - 2j,
    (numpy.float64(0.1), [numpy.float32(0.1)], numpy.float16(3)),
    {"best": numpy.int64(-(2**63)), "most": numpy.uint64(2**64 - 1), "is": numpy.bool_(True)},
    (float("inf"), -0.0, 2**127, "a\0b", "\ud800", True, 1, 1.0),
)


@pytest.mark.parametrize("value", OF_OTHER_TYPES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_the_type_that_they_are(value):
    parts = take_apart({"box": {"value": value, "tensor": Tensor()}}, Tensor)
    shape, values = json.loads(json.dumps([parts.shape, parts.values]))
    again = put_together(shape, parts.tensors, values)["box"]["value"]
    assert repr(again) == repr(value), "types too"
    assert again == value
    assert getattr(again, "default_factory", None) is getattr(value, "default_factory", None)
    assert len(leaf_paths(shape)[1]) == len(values)


def test_a_mapping_of_tensors_comes_back_as_its_type_with_their_names():
    parts = take_apart({"box": OrderedDict(a=Tensor(), b=defaultdict(dict, c=Tensor()))}, Tensor)
    assert [fqn(path) for path in leaf_paths(parts.shape)[0]] == ["box.a", "box.b.c"]
    assert type(put_together(parts.shape, parts.tensors, parts.values)["box"]["b"]) is defaultdict


def test_a_type_that_is_not_known_is_not_made():
    for name in ("os.system", "defaultdict.eval", "numpy.load", "torch.load"):
        with pytest.raises(JobFailedError, match="unknown type"):
            put_together([f"={name}", "V"], [], ["true"])


def test_bytes_come_back_from_json_as_they_were():
    """A loader's state may be bytes that it has pickled itself: they are carried, and never unpickled by us."""
    tree = {"dataloader": {"dp_rank_1": bytes(range(256)), "world_size": 2}, "none": b""}
    parts = take_apart(tree, torch.Tensor)
    shape, values = json.loads(json.dumps([parts.shape, parts.values]))
    assert put_together(shape, parts.tensors, values) == tree
    assert [fqn(path) for path in leaf_paths(shape)[1]] == ["dataloader.dp_rank_1", "dataloader.world_size", "none"]
