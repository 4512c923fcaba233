"""Copies that take their checksum on the way, past the caches or not, and what each part of them is for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperpod_ext.runtime.checkpoint import overlapped_copy as beside
from hyperpod_ext.runtime.checkpoint.mutation_check import CopySamples, MutationCheck
from hyperpod_ext.runtime.checkpoint.overlapped_copy import OverlappedCopy, Room
from hyperpod_ext.runtime.snapshot import fast_copy as streamed
from hyperpod_ext.runtime.snapshot.fast_copy import (
    PIECE,
    Unthrottle,
    bytes_of,
    copier,
    copy,
    copy_checked,
    copy_memory_checked,
    copy_pieces_checked,
    copy_to_gpu_checked,
    is_memory,
    pieces_of,
)
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme
from hyperpod_ext.runtime.snapshot.tree import take_apart


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "large": torch.rand(3 * PIECE // 4 + 5),
        "odd": torch.arange(13, dtype=torch.uint8),
        "empty": torch.rand(0, 2),
        "transposed": torch.rand(40, 30).T,
        "conjugated": torch.rand(5, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.5),
    }


class Image:
    """A state's image, its frames written."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.layout = Layout(take_apart(tensors, torch.Tensor))
        self.plan = self.layout.plan
        self.bytes = memoryview(bytearray(self.plan.nbytes))
        self.layout.write_frames(self.bytes)
        self.views = views(self.plan, self.bytes)

    def copy(self, *, copied: frozenset[int] = frozenset(), hurry: Unthrottle | None = None) -> beside.CopyProgress:
        return OverlappedCopy(self.plan, self.layout.locals, self.views, self.bytes, copied).run(hurry or Unthrottle())


# --- copies past the caches -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 1000, 4096 + 7])
@pytest.mark.parametrize("offset", [0, 1, 15, 63])
def test_every_byte_is_copied_and_none_beside_them(size: int, offset: int) -> None:
    source = ctypes.create_string_buffer(bytes(range(1, 251)) * (size // 250 + 2))
    target = ctypes.create_string_buffer(b"\xff" * (size + 256), size + 256)
    copier()(ctypes.addressof(target) + offset, ctypes.addressof(source), size)
    assert target.raw == b"\xff" * offset + source.raw[:size] + b"\xff" * (size + 256 - offset - size)


@pytest.fixture
def nothing_built(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(streamed, "__file__", str(tmp_path / "streamed.py"))
    (tmp_path / "_stream.abi3.so").write_bytes(b"for another machine")
    known = streamed._built, streamed._checker, copier
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


def test_where_nothing_was_built_memory_is_copied_all_the_same(nothing_built: None, one_thread: None) -> None:
    assert copier() is ctypes.memmove
    target = torch.zeros(3)
    copy(target, torch.ones(3))
    assert target.tolist() == [1.0] * 3
    assert copy_checked(target, torch.tensor([5.0, 6.0, 7.0]), 1) == crc64nvme(bytes_of(target), 1)
    assert target.tolist() == [5.0, 6.0, 7.0]


def test_tensors_that_are_not_plain_memory_are_told_apart() -> None:
    kinds = {name: is_memory(tensor) for name, tensor in state().items()}
    assert kinds == dict.fromkeys(kinds, True) | {"transposed": False, "conjugated": False}
    assert not is_memory(torch.imag(torch.rand(1, dtype=torch.complex64).conj()))  # its sign is not in its memory


def test_all_kinds_are_copied_as_torch_copies_them(one_thread: None) -> None:
    for tensor in state().values():
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy(target, tensor)
        assert torch.equal(target, tensor)


def test_what_was_copied_into_has_changed_for_autograd_too_and_other_sizes_are_refused(one_thread: None) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    before = weight._version
    copy(weight, torch.ones(3))
    assert weight._version > before
    with pytest.raises(RuntimeError, match="size"):
        copy(weight, torch.ones(4))


# --- a copy and its checksum in one go ------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 16, 32, 63])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 255, 256, 383, 640, 4096 + 7, (256 << 10) + 128, 600_001])
def test_copied_bytes_and_their_checksum_are_those_of_the_library(size: int, offset: int) -> None:
    copy_at(offset, size)


@pytest.mark.parametrize("size", [0, 127, 128, 256 << 10, 600_001])
def test_so_they_are_where_nothing_was_built(size: int, nothing_built: None) -> None:
    copy_at(3, size)


def copy_at(offset: int, size: int) -> None:
    source = ctypes.create_string_buffer(torch.randint(256, (size + 1,), dtype=torch.uint8).numpy().tobytes())
    target = ctypes.create_string_buffer(b"\xff" * (size + 256), size + 256)
    for before in (0, 1, 2**64 - 1, crc64nvme(b"what came before")):
        to = ctypes.addressof(target) + offset
        found = copy_memory_checked(to, ctypes.addressof(source), size, before)
        assert found == crc64nvme(source.raw[:size], before)
    assert target.raw == b"\xff" * offset + source.raw[:size] + b"\xff" * (size + 256 - offset - size)


def test_this_processor_copies_and_checks_in_one_go_where_it_can() -> None:
    """Else the test before compares the library with itself."""
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    if not {"avx2", "vpclmulqdq"} <= flags or streamed._built() is None:
        pytest.skip("this processor, or this build, takes the checksum before it copies")
    assert streamed._checker() is not None


def test_the_numbers_of_the_fold_are_powers_of_x_divided_by_the_polynomial(root: Path) -> None:
    def reflected_power(exponent: int) -> int:
        rest = 1
        for _ in range(exponent):
            rest = (rest << 1) ^ (0x1AD93D23594C93659 if rest >> 63 else 0)
        return int(f"{rest:064b}"[::-1], 2)

    source = (root / "hyperpod_ext/runtime/snapshot/stream.c").read_text()
    for bits in (128, 256, 1024):
        numbers = f"BITS_{bits} = {{{reflected_power(bits + 63):#x}, {reflected_power(bits - 1):#x}}}"
        assert numbers in source


def test_all_kinds_are_checked_while_they_are_copied(threads: int) -> None:
    for name, tensor in state().items():
        if is_memory(tensor):
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            before = target._version
            assert copy_checked(target, tensor, 3) == crc64nvme(bytes_of(tensor), 3), name
            assert torch.equal(target, tensor), name
            assert target._version > before, name
            strided = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
            assert copy_checked(strided, tensor, 0) == crc64nvme(bytes_of(tensor)), name
            assert torch.equal(strided, tensor), name


# --- the checksum on the way ----------------------------------------------------------------------


def test_the_image_is_what_a_plain_copy_makes_and_the_checksum_is_its() -> None:
    image = Image(state())
    copied = image.copy()
    assert copied.items == len(image.plan.items)
    for view, tensor in zip(image.views, image.layout.locals, strict=True):
        assert torch.equal(view, tensor)
    assert crc64nvme(image.bytes[copied.nbytes :], copied.checksum) == crc64nvme(image.bytes)


def test_bytes_that_are_only_looked_at_stay_where_they_are() -> None:
    for size in (0, 5, 128, 3 * PIECE + 7):
        source = torch.randint(256, (size,), dtype=torch.uint8)
        before = source.clone()
        assert copy_pieces_checked(pieces_of([(0, source.data_ptr(), size)]), 9, Unthrottle()) == (
            size,
            crc64nvme(bytes_of(before), 9),
        )
        assert torch.equal(source, before)


def test_what_is_in_the_image_already_is_not_copied_again_but_counted() -> None:
    image = Image(state())
    image.views[0].fill_(7.0)
    copied = image.copy(copied=frozenset([0]))
    assert image.views[0][0] == 7.0
    assert crc64nvme(image.bytes[copied.nbytes :], copied.checksum) == crc64nvme(image.bytes)


@pytest.mark.parametrize("built", [True, False])
def test_one_that_is_waited_for_ends_and_tells_how_far_it_came(built: bool, request: pytest.FixtureRequest) -> None:
    """Whoever waits says so by writing a number: here the copy itself does, where it has come to it."""
    if not built:
        request.getfixturevalue("nothing_built")
    image, hurry = (
        Image({"first": torch.rand(PIECE), "flag": torch.tensor([1]).int(), "last": torch.rand(9)}),
        Unthrottle(),
    )
    image.views[1] = torch.frombuffer(hurry.flag, dtype=torch.int32)
    copied = image.copy(hurry=hurry)
    assert (copied.items, copied.nbytes) == (2, image.plan.items[1].data + 4)
    assert torch.equal(image.views[0], image.layout.locals[0])
    assert not image.views[2].any()
    image.bytes[copied.nbytes - 4 : copied.nbytes] = (1).to_bytes(4, "little")
    assert copied.checksum == crc64nvme(image.bytes[: copied.nbytes])
    assert image.copy(hurry=hurry) == (0, 0, 0)


def test_a_tensor_that_is_given_other_memory_meanwhile_is_copied_from_its_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout has an alias of it, so nobody reads freed memory; `CapturedState.versions` has its address."""
    tensor, plain = torch.rand(1 << 20), copy_pieces_checked
    image, before = Image({"tensor": tensor}), tensor.clone()

    def change(*args: Any) -> tuple[int, int]:
        tensor.data = torch.zeros(1)
        return plain(*args)

    monkeypatch.setattr(beside, "copy_pieces_checked", change)
    image.copy()
    assert torch.equal(image.views[0], before)


@pytest.mark.parametrize("built", [True, False])
def test_it_need_not_come_to_the_end_of_a_tensor(built: bool, request: pytest.FixtureRequest) -> None:
    if not built:
        request.getfixturevalue("nothing_built")
    hurry, source, target = Unthrottle(), torch.zeros(PIECE, dtype=torch.int32), (ctypes.c_char * (4 * PIECE))()
    source[PIECE // 4 + 2] = 1  # in its second piece of four, and the flag lies where that is copied to
    to = ctypes.addressof(target)
    hurry.flag = ctypes.c_int.from_address(to + PIECE + 8)
    done, checksum = copy_pieces_checked(pieces_of([(to, source.data_ptr(), 4 * PIECE)]), 5, hurry)
    assert done == 2 * PIECE
    assert checksum == crc64nvme(bytes_of(source)[:done], 5)


# --- whether there is time for it -----------------------------------------------------------------


def test_there_is_time_where_the_last_steps_were_long_enough() -> None:
    room = Room()
    assert not room.enough()
    room.copied(0.1)
    assert not room.enough()  # nobody knows yet how long a step is
    room.waited(1.0)
    assert room.enough()
    room.waited(0.3)
    assert not room.enough()
    for _ in range(4):
        room.waited(1.0)
    assert room.enough()  # that short one is long ago


def test_a_copy_that_was_slow_once_does_not_count() -> None:
    room = Room()
    for seconds in (0.1, 0.9):  # into memory that nobody had touched, say
        room.copied(seconds)
    room.waited(0.5)
    assert room.enough()


def test_one_core_that_takes_longer_than_there_is_time_is_not_asked_again_until_steps_are_longer() -> None:
    """A plain copy by many threads lasts a tenth of one with its checksum by one."""
    room = Room()
    room.copied(0.1)
    room.waited(0.8)
    assert room.enough()
    room.copied_overlapped(0.01, 1, 100)  # it was waited for at once
    assert room.enough()
    room.copied_overlapped(0.5, 50, 100)
    assert not room.enough()
    for _ in range(4):
        room.waited(1.6)
    assert room.enough()


def test_one_that_was_slow_once_is_tried_again() -> None:
    room = Room()
    room.copied(0.1)
    room.waited(0.8)
    room.copied_overlapped(1.0, 100, 100)
    tries = 0
    while not room.enough():
        tries += 1
        room.copied(0.1)
    assert tries == 6


def test_a_copy_of_no_length_is_left_as_it_is() -> None:
    room = Room()
    room.copied(0.001)
    room.waited(10.0)
    assert not room.enough()


# --- whether it was changed -----------------------------------------------------------------------


def test_a_tensor_changed_in_place_is_named() -> None:
    tensors = {f"t{i}": torch.rand(9) for i in range(40)}
    check = MutationCheck(list(tensors), list(tensors.values()))
    seen = check.look()
    assert check.changed(seen) is None
    tensors["t4"].data[3] = 9.0
    assert check.changed(seen) is None, "no counter rises"
    tensors["t7"].add_(1)
    assert check.changed(seen) == "t7"


def samples_of(tensors: Sequence[torch.Tensor]) -> tuple[CopySamples, list[torch.Tensor]]:
    copies = [tensor.detach().clone() for tensor in tensors]
    return CopySamples([f"t{i}" for i in range(len(tensors))], tensors, copies), copies


@pytest.mark.parametrize("built", [True, False])
def test_a_copy_of_other_values_than_the_tensor_has_is_named(built: bool, request: pytest.FixtureRequest) -> None:
    if not built:
        request.getfixturevalue("nothing_built")
    tensors = [torch.rand(9) for _ in range(40)] + [torch.rand(3 << 20)]
    samples, copies = samples_of(tensors)
    assert samples.differing() is None
    for index in (4, 39, 40):
        copies[index].add_(1)
        assert samples.differing() == f"t{index}"
        copies[index].sub_(1).copy_(tensors[index])
    copies[40][1 << 20 : 2 << 20] += 1  # 4 MiB of its middle, as after a swap in the course of the copy
    assert samples.differing() == "t40"


def test_samples_of_tensors_that_are_not_plain_memory_or_not_a_number() -> None:
    tensors = [*state().values(), torch.full((3,), float("nan")), torch.empty(0)]
    assert samples_of(tensors)[0].differing() is None
    assert samples_of([])[0].differing() is None


@pytest.mark.parametrize("cores", [1, 3, 64])
@pytest.mark.parametrize("nbytes", [0, 1, 999, 4000, 4001])
def test_a_restore_to_a_gpu_takes_the_checksum_of_the_whole_image(monkeypatch, cores, nbytes):
    monkeypatch.setattr(streamed, "_PART", 1000)
    monkeypatch.setattr(streamed.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    image = memoryview(bytearray(torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()))
    sources = [torch.frombuffer(image[begin : begin + 7], dtype=torch.uint8) for begin in range(0, nbytes - 7, 500)]
    targets = [torch.zeros_like(source) for source in sources]
    assert copy_to_gpu_checked(targets, sources, image) == crc64nvme(image)
    assert all(map(torch.equal, targets, sources))
