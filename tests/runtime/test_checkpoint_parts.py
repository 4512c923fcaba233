"""Layout, skeleton and manifest of a snapshot."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import CorruptSnapshotError, JobFailedError
from hyperpod_ext.runtime.checkpoint.image import Item, Layout, copy_all
from hyperpod_ext.runtime.checkpoint.manifest import check_bytes, check_manifest, crc64nvme, sign
from hyperpod_ext.runtime.checkpoint.tree import put_together, take_apart

SECRET = b"secret of the job"
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_from_json_as_it_was(tree):
    skeleton, tensors = take_apart(tree)
    assert put_together(json.loads(json.dumps(skeleton)), tensors) == tree


def test_optimizer_state_comes_back_as_it_was():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    skeleton, tensors = take_apart(optimizer.state_dict())
    state = put_together(json.loads(json.dumps(skeleton)), tensors)
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_leaf_that_cannot_be_stored_is_named_with_its_path():
    with pytest.raises(JobFailedError, match=r"model\.hooks\[1\] is a value of type function"):
        take_apart({"model": {"hooks": [1, lambda: None]}})


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8))
def test_an_image_gives_back_what_was_copied_into_it(kinds):
    tensors = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in kinds]
    layout = Layout.of(tensors)
    image = bytearray(layout.nbytes)
    copy_all(tensors, layout.views(image))
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())), layout.nbytes)
    assert again == layout
    for before, after in zip(tensors, again.views(image), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)
    assert all(item.offset % 64 == 0 for item in layout.items)


@pytest.mark.parametrize(
    "item",
    [["float32", [4], 0, 64], ["float32", [4], 60, 16], ["float32", [4], -16, 16], ["load", [4], 0, 16]],
)
def test_an_item_table_that_lies_is_refused(item):
    with pytest.raises(CorruptSnapshotError):
        Layout.from_json([item], 64)
    assert Layout.from_json([["float32", [4], 48, 16]], 64).items == (Item("float32", (4,), 48, 16),)


def manifest(**changes):
    data = {"format": 1, "job": "j", "owner": 3, "step": 7, "save_id": "g1-s7", "crc64nvme": crc64nvme(b"bytes")}
    return {**sign(data, SECRET), **changes}


def test_a_manifest_of_this_job_is_accepted():
    check_manifest(manifest(), SECRET, job="j")
    check_bytes(manifest(), b"bytes")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 8}, "not signed"),
        ({"signature": ""}, "not signed"),
        ({"format": 2}, "format 2 is newer than 1"),
        ({"format": None}, "format None is newer"),
    ],
)
def test_a_manifest_that_was_changed_or_is_newer_is_refused(changes, words):
    with pytest.raises(CorruptSnapshotError, match=words):
        check_manifest(manifest(**changes), SECRET, job="j")


def test_bytes_that_differ_are_refused_with_rank_and_step():
    with pytest.raises(CorruptSnapshotError, match="rank 3 at step 7"):
        check_bytes(manifest(), b"byteS")


def test_the_checksum_is_the_one_s3_computes():
    """Check value of CRC-64/NVME in the catalogue of CRC algorithms."""
    assert crc64nvme(b"123456789") == "ae8b14860a799888"
