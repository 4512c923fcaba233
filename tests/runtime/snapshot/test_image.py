"""Images of state: what goes in comes out, through our own views and through torch.load."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import DTYPE_BYTES, read_plan
from hyperpod_ext.runtime.snapshot.tree import take_apart
from hyperpod_ext.runtime.snapshot.zip_file import ALIGNMENT, archive, frame


def image_of(tensors: list[torch.Tensor], filled: bytes = b"\0") -> tuple[Layout, bytearray]:
    """Layout and image of a list of tensors, in memory that held something else before."""
    layout = Layout(take_apart({"t": tensors, "n": 1}, torch.Tensor))
    image = bytearray(filled * layout.plan.nbytes)
    layout.write_frames(memoryview(image))
    for source, destination in zip(layout.locals, views(layout.plan, image), strict=True):
        destination.copy_(source)
    return layout, image


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit; torch.equal knows no float8, and no NaN."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and bytes(one.reshape(-1).view(torch.uint8)) == bytes(other.reshape(-1).view(torch.uint8))


def random_bits(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


ONE = torch.ones(1)
NAMES = [name for name in DTYPE_BYTES if hasattr(torch, name)]
"""Older torch has fewer types."""
DTYPES = [getattr(torch, name) for name in NAMES]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8))
def test_an_image_gives_back_what_was_copied_into_it(kinds):
    tensors = [random_bits(dtype, shape) for dtype, shape in kinds]
    layout, image = image_of(tensors)
    again = read_plan(json.loads(json.dumps(layout.plan.to_json())), layout.plan.digest)
    assert again == layout.plan
    for before, after in zip(tensors, views(again, image), strict=True):
        assert same(before, after)
    assert all(item.start % ALIGNMENT == item.data % ALIGNMENT == 0 for item in layout.plan.items)


@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (2, 0, 3), (1, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_each_archive_without_trusting_it(name, shape):
    dtype = getattr(torch, name)
    assert dtype.itemsize == DTYPE_BYTES[name]
    before = [random_bits(dtype, shape), random_bits(dtype, shape)]
    layout, image = image_of(before)
    for item, tensor in zip(layout.plan.items, before, strict=True):
        after = torch.load(io.BytesIO(image[item.start : item.end]), weights_only=True)
        assert same(after, tensor)


def test_tensors_that_are_not_contiguous_are_laid_out_as_if_they_were():
    transposed, strided, expanded = torch.rand(4, 3).T, torch.rand(8)[::2], torch.rand(1, 3).expand(4, 3)
    layout, image = image_of([transposed, strided, expanded])
    for item, tensor in zip(layout.plan.items, (transposed, strided, expanded), strict=True):
        assert torch.equal(torch.load(io.BytesIO(image[item.start : item.end])), tensor)


def test_equal_states_make_equal_images_whatever_the_memory_held_before():
    tensors = [torch.rand(3), torch.rand(2, 2).bool(), torch.rand(100)]
    assert image_of(tensors, b"\0")[1] == image_of([t.clone() for t in tensors], b"\xff")[1]


def test_a_state_without_tensors_has_an_image_too():
    layout, image = image_of([])
    assert layout.plan.items == ()
    assert len(image) == layout.plan.nbytes == 1


@pytest.mark.parametrize("nbytes", [(1 << 32) - 2, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_an_archive_beyond_4_gib_is_one_that_unzips(tmp_path, nbytes):
    """Only its headers are written: the data is a hole in the file."""
    around = frame(b"pickle", nbytes)
    with (tmp_path / "archive").open("w+b") as file:
        file.write(around.prefix)
        file.seek(nbytes, io.SEEK_CUR)
        file.write(around.suffix)
        with zipfile.ZipFile(file) as archive:
            (data,) = (info for info in archive.infolist() if info.filename == "archive/data/0")
            assert (data.file_size, data.compress_size) == (nbytes, nbytes)
            assert data.extra.startswith(b"\1\0") == (nbytes >= (1 << 32) - 1)  # zip64 sizes, where they are needed
            assert archive.read("archive/data.pkl") == b"pickle"
            with archive.open("archive/data/0") as hole:  # reads the local header, and finds it to agree
                assert hole.read(16) == bytes(16)
        reader = torch._C.PyTorchFileReader(str(tmp_path / "archive"))
        assert reader.get_record_offset("data/0") == len(around.prefix)


def test_an_object_without_tensors_is_an_archive_that_torch_reads():
    blob = archive(b"\x80\x02K\x07.")  # the pickle of 7
    assert torch.load(io.BytesIO(blob), weights_only=True) == 7
    assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.to_sparse(), r"t\.0 is a tensor of type torch\.float32 and layout torch\.sparse_coo"),
        (lambda t: t.to_sparse_csr(), r"t\.0 .* layout torch\.sparse_csr"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"t\.0 is a tensor of type torch\.qint8"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_dense_are_refused_by_name(make, words):
    with pytest.raises(JobFailedError, match=words):
        Layout(take_apart({"t": [make(torch.eye(2))]}, torch.Tensor))


@pytest.mark.parametrize("state", [{"a.b": ONE, "a": {"b": ONE}}, {"a": {1: ONE, "1": ONE}}])
def test_two_tensors_of_one_name_are_refused(state):
    """Filled by name, one would get the other's values."""
    with pytest.raises(JobFailedError, match="two tensors of the state are named a"):
        Layout(take_apart(state, torch.Tensor))


@contextmanager
def process_group(backend: str, store: dist.Store, rank: int, world_size: int) -> Iterator[DeviceMesh]:
    """A mesh over all ranks of a process group."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with process_group("gloo", HashStore(), rank=0, world_size=1) as mesh:
        yield mesh


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_distributed_tensor_is_laid_out_as_its_shard(mesh, placement):
    full = torch.rand(4, 6)
    layout, image = image_of([distribute_tensor(full, mesh, [placement])])
    (item,) = layout.plan.items
    assert (item.shape, item.offsets, item.sizes) == ((4, 6), (0, 0), (4, 6))
    assert torch.equal(views(layout.plan, image)[0], full)


def test_a_shard_of_a_larger_tensor_knows_its_place():
    """Seen by the second of two ranks; the first is not needed as long as nothing is sent."""
    with process_group("fake", FakeStore(), rank=1, world_size=2) as mesh:
        part = torch.rand(2, 6)
        tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 6)), stride=(6, 1))
        layout, image = image_of([tensor])
    (item,) = layout.plan.items
    assert (item.shape, item.offsets, item.sizes) == ((5, 6), (3, 0), (2, 6))
    assert torch.equal(views(layout.plan, image)[0], part)


def test_a_rank_that_holds_nothing_of_a_tensor_has_no_item_for_it():
    with process_group("fake", FakeStore(), rank=1, world_size=2) as mesh:
        nothing, something = torch.rand(0, 6), torch.rand(3)
        sharded = DTensor.from_local(
            nothing, mesh, [Shard(0)], run_check=False, shape=torch.Size((1, 6)), stride=(6, 1)
        )
        layout, _ = image_of([sharded, something])
    assert [item.tensor for item in layout.plan.items] == [1]


def test_a_sum_that_is_not_made_yet_is_refused_by_name(mesh):
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(JobFailedError, match=r"t\.0 has the placements .*: the values of its ranks are not summed yet"):
        Layout(take_apart({"t": [partial]}, torch.Tensor))
