"""Copy memory without filling the CPU's caches, if the library of stream.c is built; otherwise, copy normally."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, join_checksums

Copy = Callable[[int, int, int], object]
"""A function that copies memory without the GIL. Arguments: destination address, source address, number of bytes."""

PIECE = 256 << 10
"""Bytes that are copied between two checks of an `Unthrottle` flag. The number is small enough that the bytes stay in a
core's cache from the computation of the checksum to the copy."""
_CACHED = 1 << 20
"""Bytes whose checksum is computed at once, before several threads copy them: as many as fit into the shared cache."""
_PART = 16 << 20
"""Minimum number of bytes for each thread that computes checksums; starting a thread for fewer takes too long."""
_MOST_THREADS = 4
"""Maximum number of threads that compute checksums: a core computes checksums at 7 to 11 GB/s, and copies to a GPU
reach 54 GB/s (docs/gpu.md, E8)."""


class Piece(ctypes.Structure):
    """Memory to copy: destination address (0: only compute the checksum), source address, and number of bytes."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Unthrottle:
    """A flag that makes another thread's copy stop early. The copying thread reads the flag without the GIL."""

    def __init__(self) -> None:
        self.flag = ctypes.c_int(0)

    def set(self) -> None:
        self.flag.value = 1

    def clear(self) -> None:
        self.flag.value = 0

    def is_set(self) -> bool:
        return self.flag.value != 0


@cache
def _built() -> ctypes.CDLL | None:
    for built in sorted(Path(__file__).parent.glob("_stream*.so")):
        try:
            library = ctypes.CDLL(str(built))
            library.hpx_copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
            library.hpx_copy.restype = None
            library.hpx_copy_checked.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
            library.hpx_copy_checked.restype = ctypes.c_int64
        except (OSError, AttributeError):  # the library is for another machine type, or from an older stream.c
            continue
        return library
    return None


@cache
def copier() -> Copy:
    """Return the function that copies memory: the one of stream.c if it is built, otherwise `memmove`."""
    library = _built()
    return library.hpx_copy if library is not None else ctypes.memmove


@cache
def _checker() -> Callable[[Any, int, Any, Any], int] | None:
    """Return stream.c's function that copies and computes a checksum in one pass; None if this CPU cannot run it."""
    library = _built()
    nothing = (Piece * 0)(), 0, ctypes.byref(ctypes.c_int(0)), ctypes.byref(ctypes.c_uint64(0))
    return library.hpx_copy_checked if library and library.hpx_copy_checked(*nothing) == 0 else None


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `destination`, a tensor of the same shape and type, by the fastest method available."""
    if torch.get_num_threads() == 1 and _is_plain(destination, source):
        copier()(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        increment_version(destination)  # `copy_` also does this, so that autograd detects the change
    else:
        # several threads are faster than one thread that bypasses the caches
        with torch.no_grad():
            destination.copy_(source)


def copy_checked(destination: torch.Tensor, source: torch.Tensor, checksum: int) -> int:
    """Copy `source` to `destination`, and compute a CRC64-NVME of the bytes while they are in a cache.

    Args:
        destination: tensor of the same shape and type.
        source: a tensor for which `is_memory` is true.
        checksum: checksum of the bytes that precede `source`.

    Returns:
        The checksum of the earlier bytes followed by the bytes of `source`.
    """
    nbytes = source.numel() * source.element_size()
    by_one = _checker() or torch.get_num_threads() == 1  # more threads would not speed up the checksum
    if by_one and _is_plain(destination, source):
        checksum = copy_memory_checked(destination.data_ptr(), source.data_ptr(), nbytes, checksum)
        increment_version(destination)
        return checksum
    pieces = [(destination, source)]
    if nbytes > _CACHED and destination.is_contiguous():
        step = _CACHED // source.element_size()
        pieces = list(zip(torch.split(destination.view(-1), step), torch.split(source.view(-1), step), strict=True))
    for into, piece in pieces:
        checksum = crc64nvme(bytes_of(piece), checksum)
        copy(into, piece)
    return checksum


def copy_to_gpu_checked(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], image: memoryview
) -> int:
    """Copy a snapshot's bytes into tensors on a GPU, and return the CRC64-NVME of all bytes.

    The checksum is computed by threads while the GPU copies.

    Args:
        destinations: tensors on a GPU.
        sources: for each destination, a tensor in the memory of `image`.
        image: all bytes of the snapshot.
    """
    parts = max(1, min(_threads(), len(image) // _PART))
    bounds = [len(image) * part // parts for part in range(parts + 1)]
    pieces = [image[begin:end] for begin, end in itertools.pairwise(bounds)]
    try:
        with ThreadPoolExecutor(parts) as pool, torch.no_grad():
            checksums = [pool.submit(crc64nvme, piece) for piece in pieces]
            for destination, source in zip(destinations, sources, strict=True):
                destination.copy_(source, non_blocking=True)
            found = [(each.result(), len(piece)) for each, piece in zip(checksums, pieces, strict=True)]
    finally:  # wait until the GPU has read `image`, which the caller may overwrite later
        for device in {destination.device for destination in destinations if destination.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
    return join_checksums(found)


def _threads() -> int:
    """Return the number of threads for checksums: this rank's share of the node's cores, at most `_MOST_THREADS`."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def copy_memory_checked(to: int, source: int, nbytes: int, checksum: int) -> int:
    """Copy `nbytes` bytes from the address `source` to the address `to`, in one thread.

    Returns `checksum` after extending it over the copied bytes.
    """
    return copy_pieces_checked(pieces_of([(to, source, nbytes)]), checksum, Unthrottle())[1]


def pieces_of(pieces: Sequence[tuple[int, int, int]]) -> ctypes.Array[Piece]:
    """Return an array of `Piece`, from tuples (destination address, source address, number of bytes)."""
    return (Piece * len(pieces))(*(Piece(*piece) for piece in pieces))


def copy_pieces_checked(pieces: ctypes.Array[Piece], checksum: int, unthrottle: Unthrottle) -> tuple[int, int]:
    """Copy pieces of memory in order, until all are copied or `unthrottle` is set.

    Returns the number of copied bytes, and `checksum` after extending it over the copied bytes.
    """
    checker, done = _checker(), 0
    if checker is not None:  # one call without the GIL, which the training thread needs
        found = ctypes.c_uint64(checksum)
        done = checker(pieces, len(pieces), ctypes.byref(unthrottle.flag), ctypes.byref(found))
        return done, found.value
    for piece in pieces:
        to, source = piece.to or 0, piece.source or 0
        for start in range(0, piece.nbytes, PIECE):
            if unthrottle.is_set():
                return done, checksum
            length = min(PIECE, piece.nbytes - start)
            checksum = crc64nvme(memory(source + start, length), checksum)
            if to:
                copier()(to + start, source + start, length)
            done += length
    return done, checksum


def _is_plain(destination: torch.Tensor, source: torch.Tensor) -> bool:
    matches = destination.shape == source.shape and destination.dtype == source.dtype
    return matches and is_memory(source) and is_memory(destination)


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are contiguous bytes in CPU memory that can be saved as they are."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a tensor for which `is_memory` is true."""
    return memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def address_of(image: memoryview) -> int:
    """Return the address of a writable memoryview."""
    return ctypes.addressof(ctypes.c_char.from_buffer(image))


def memory(address: int, nbytes: int) -> memoryview:
    """Return a writable memoryview of `nbytes` bytes at an address in this process."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
