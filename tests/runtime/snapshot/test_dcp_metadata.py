"""Plain torch.distributed.checkpoint reads what we write, and sees what it would have written itself."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hyperpod_ext.runtime.snapshot.dcp_metadata import METADATA_FILE, RankFile, derive
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import DTYPE_BYTES, Plan
from hyperpod_ext.runtime.snapshot.tree import take_apart

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def trained(seed: int) -> dict[str, Any]:
    """A state as training has it: modules, an optimizer, numbers, and tensors in lists."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1).bfloat16())
    optimizer = torch.optim.AdamW(model[:2].parameters(), lr=0.1 / (seed + 1), betas=(0.5, 0.9 + seed / 100))
    model[:2](torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "a list": [seed, [2, 3], {"tensor": torch.rand(3)}, torch.tensor(seed)],
        "tuples": [(seed, "text"), ({"a": [seed]}, ()), {"b": (1, [2])}],
        "nothing": {"list": [], "dict": {}, "tuple": (), "none": None},
        "numbers": [float("inf"), 1 << 70, -1, True, 1e-300],
        "empty": torch.rand(0, 3),
        "with a dot.in it": {3: torch.rand(2, 2)},
    }


def write(folder: Path, rank: int, state: Any) -> RankFile:
    """The image of one rank."""
    parts = take_apart(state, torch.Tensor)
    layout = Layout(parts)
    image = bytearray(layout.plan.nbytes)
    layout.write_frames(memoryview(image))
    for source, destination in zip(layout.locals, views(layout.plan, image), strict=True):
        destination.copy_(source)
    (folder / f"__{rank}_0.distcp").write_bytes(image)
    return RankFile(rank, layout.plan, parts.values, f"__{rank}_0.distcp")


def finish(folder: Path, parts: Sequence[RankFile]) -> Path:
    derived = derive(parts, "__0_1.distcp")
    (folder / "__0_1.distcp").write_bytes(derived.values_file)
    (folder / METADATA_FILE).write_bytes(derived.metadata)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `trained(7)` as we write it."""
    return finish(tmp_path, [write(tmp_path, 0, trained(7))])


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal in every leaf, type and place."""
    (flat, paths), (other_flat, other_paths) = flatten_state_dict(one), flatten_state_dict(other)
    return paths == other_paths and all(
        torch.equal(value, other_flat[name]) and value.dtype == other_flat[name].dtype
        if isinstance(value, torch.Tensor)
        else value == other_flat[name] and type(value) is type(other_flat[name])
        for name, value in flat.items()
    )


def test_plain_load_fills_a_fresh_state(saved):
    state = trained(1)
    assert not equal(state, trained(7))
    dcp.load(state, checkpoint_id=saved)
    assert equal(state, trained(7))


def test_the_converter_to_one_file_works(saved, tmp_path):
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    flat, _ = flatten_state_dict(trained(7))
    found, _ = flatten_state_dict(state)
    assert all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in flat.items()
    )


def metadata_of(folder: Path) -> Any:
    """What torch reads there, but for strides: torch 2.15 writes them, and 2.13 reads no metadata that has them."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(getattr(entry, "properties", None), "strides"):
            entry.properties.strides = None
    return metadata


def test_the_metadata_is_what_torch_itself_writes(saved, tmp_path):
    dcp.save(trained(7), checkpoint_id=tmp_path / "theirs")
    ours, theirs = metadata_of(saved), metadata_of(tmp_path / "theirs")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert getattr(theirs, "version", None) in (None, ours.version)  # older torch writes none


@pytest.mark.parametrize("name", [name for name in DTYPE_BYTES if hasattr(torch, name)])
def test_every_type_is_described_as_torch_describes_it(tmp_path, name):
    state = {"t": torch.zeros(2, 3).to(getattr(torch, name))}
    folder = finish(tmp_path, [write(tmp_path, 0, state)])
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    assert metadata_of(folder).state_dict_metadata == metadata_of(tmp_path / "theirs").state_dict_metadata
    fresh = {"t": torch.ones(2, 3).to(getattr(torch, name))}
    dcp.load(fresh, checkpoint_id=folder)
    assert fresh["t"].view(torch.uint8).equal(state["t"].view(torch.uint8))


def test_a_tensor_of_a_trillion_elements_has_its_numbers(tmp_path):
    """Sizes and places beyond 32 bits, and of just under; only the metadata is looked at."""
    sizes = ((1 << 31) - 1, 1 << 31, 1 << 40, 127, 128, 255, 256, 65535, 65536)
    for size in sizes:
        parts = take_apart({"t": torch.empty(size, dtype=torch.uint8, device="meta")}, torch.Tensor)
        plan = Layout(parts).plan
        metadata = pickle.loads(derive([RankFile(0, plan, [], "__0_0.distcp")], "v").metadata)
        described, (stored,) = metadata.state_dict_metadata["t"], metadata.storage_data.values()
        assert described.size == torch.Size([size])
        assert described.chunks[0].sizes == torch.Size([size])
        assert stored.length == plan.nbytes > size


# --- several ranks --------------------------------------------------------------------------------


def shard(part: RankFile, offsets: tuple[int, ...], shape: tuple[int, ...]) -> RankFile:
    """`part` with its first tensor declared to be a shard of a larger one, as a DTensor's is."""
    item, *others = part.plan.items
    plan = Plan(part.plan.shape, (item._replace(offsets=offsets, shape=shape), *others), part.plan.nbytes)
    return RankFile(part.rank, plan, part.values, part.file)


def test_shards_of_two_ranks_are_one_tensor_to_any_reader(tmp_path):
    whole, replicated = torch.rand(5, 4), torch.rand(3)
    first = write(tmp_path, 0, {"w": whole[:3], "r": replicated, "rank": 0})
    second = write(tmp_path, 1, {"w": whole[3:], "r": replicated, "rank": 1})
    finish(tmp_path, [shard(second, (3, 0), (5, 4)), shard(first, (0, 0), (5, 4))])
    state = {"w": torch.zeros(5, 4), "r": torch.zeros(3), "rank": -1}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], whole)
    assert torch.equal(state["r"], replicated)
    assert state["rank"] == 0  # what is the same everywhere to torch is the lowest rank's


def test_what_several_ranks_hold_is_stored_once(tmp_path):
    state = {"w": torch.rand(5, 4)}
    parts = [write(tmp_path, rank, state) for rank in (2, 0, 1)]
    metadata = pickle.loads(derive(parts, "v").metadata)
    (stored,) = metadata.storage_data.values()
    assert stored.relative_path == "__0_0.distcp"
    assert len(metadata.state_dict_metadata["w"].chunks) == 1


def test_what_only_another_rank_has_can_be_loaded_too(tmp_path):
    """Pipelines: each rank holds layers of its own."""
    layers = {"first": torch.rand(2), "second": torch.rand(3)}
    parts = [write(tmp_path, rank, {name: layers[name]}) for rank, name in enumerate(layers)]
    finish(tmp_path, parts)
    state = {"first": torch.zeros(2), "second": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert all(torch.equal(state[name], layers[name]) for name in layers)


def test_tensors_in_a_tuple_are_found_by_their_places(tmp_path):
    """PyTorch would pickle the tuple whole; whoever gives a list to read into gets them."""
    pair = (torch.rand(2), 7)
    finish(tmp_path, [write(tmp_path, 0, {"pair": pair})])
    state = {"pair": [torch.zeros(2), 0]}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["pair"][0], pair[0])
    assert state["pair"][1] == 7


def test_values_that_only_another_rank_has_can_be_loaded_too(tmp_path):
    parts = [write(tmp_path, 0, {"a": 1}), write(tmp_path, 1, {"b": {"c": "text"}})]
    finish(tmp_path, parts)
    state = {"a": 0, "b": {"c": ""}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"a": 1, "b": {"c": "text"}}


def test_no_pickle_of_ours_runs_anything(saved):
    """Every name in the metadata is one of torch's, by the list that the writer gives."""
    import pickletools

    wanted = {"torch", "torch.serialization", "torch.distributed.checkpoint.metadata"}
    wanted |= {"torch.distributed.checkpoint.filesystem"}
    opcodes = pickletools.genops((saved / METADATA_FILE).read_bytes())
    modules = {str(argument).split()[0] for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    assert modules == wanted
