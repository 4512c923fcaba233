"""Nested state taken apart and put together again."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.tree import fqn, leaf_paths, put_together, take_apart


class Tensor:
    """Stands for a tensor: trees know tensors only by their type."""


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
    ],
)
def test_what_cannot_be_stored_is_named_with_its_path(tree, words):
    with pytest.raises(JobFailedError, match=words):
        take_apart(tree, Tensor)


def test_bytes_come_back_from_json_as_they_were():
    """A loader's state may be bytes that it has pickled itself: they are carried, and never unpickled by us."""
    tree = {"dataloader": {"dp_rank_1": bytes(range(256)), "world_size": 2}, "none": b""}
    parts = take_apart(tree, torch.Tensor)
    shape, values = json.loads(json.dumps([parts.shape, parts.values]))
    assert put_together(shape, parts.tensors, values) == tree
    assert [fqn(path) for path in leaf_paths(shape)[1]] == ["dataloader.dp_rank_1", "dataloader.world_size", "none"]
