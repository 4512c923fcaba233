"""Copies of plain memory past the caches, where this machine could build them (see stream.c); else as ever."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.autograd.graph import increment_version

from hyperpod_ext.runtime.checkpoint.manifest import crc64nvme

Copy = Callable[[int, int, int], object]
"""Address to copy to, address to copy from, bytes. Frees the GIL."""

_STEP = 128
"""Bytes; of so many, or a multiple, the checksum is taken while they are copied."""
_ONES = 2**64 - 1
_OWN_CACHE = 256 << 10
"""Bytes that are still in a core's own cache when they are copied after their checksum."""
_CACHED = 1 << 20
"""And in the one that cores share: several may copy them."""


@cache
def _built() -> ctypes.CDLL | None:
    for built in sorted(Path(__file__).parent.glob("_stream*.so")):
        try:
            library = ctypes.CDLL(str(built))
            library.hpx_copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
            library.hpx_copy.restype = None
            library.hpx_copy_folded.argtypes = (*library.hpx_copy.argtypes, ctypes.c_uint64, ctypes.c_void_p)
        except (OSError, AttributeError):  # built for another kind of machine, or from an earlier source
            continue
        return library
    return None


@cache
def copier() -> Copy:
    """What copies memory here."""
    library = _built()
    return library.hpx_copy if library is not None else ctypes.memmove


@cache
def _folder() -> Callable[[int, int, int, int, int], object] | None:
    """What copies memory and takes its checksum in one go, if this processor can (see stream.c)."""
    library = _built()
    buffers = [(ctypes.c_char * _STEP)() for _ in range(3)]
    to, source, rest = map(ctypes.addressof, buffers)
    return library.hpx_copy_folded if library and library.hpx_copy_folded(to, source, _STEP, 0, rest) else None


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """`destination.copy_(source)` of tensors of one shape and type, by the fastest way there is for this thread."""
    if torch.get_num_threads() == 1 and _is_plain(destination, source):
        copier()(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        increment_version(destination)  # a graph that has saved it is told, as `copy_` tells it
    else:  # several threads are faster than one that goes past the caches
        with torch.no_grad():
            destination.copy_(source)


def copy_checked(destination: torch.Tensor, source: torch.Tensor, checksum: int) -> int:
    """`copy`, memory being read once for both; returns the CRC64-NVME `checksum`, gone on over the source's bytes.

    Args:
        source: one that `is_memory`.
    """
    nbytes = source.numel() * source.element_size()
    if (_folder() or torch.get_num_threads() == 1) and _is_plain(destination, source):  # several could only copy faster
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


def copy_memory_checked(to: int, source: int, nbytes: int, checksum: int) -> int:
    """The same of memory at these addresses, one copying."""
    done, folder = 0, _folder()
    if folder is not None and nbytes >= _STEP:
        done, rest = nbytes - nbytes % _STEP, (ctypes.c_char * 16)()
        folder(to, source, done, checksum ^ _ONES, ctypes.addressof(rest))  # between its calls, a CRC is inverted
        checksum = crc64nvme(rest, _ONES)
    for start in range(done, nbytes, _OWN_CACHE):
        length = min(_OWN_CACHE, nbytes - start)
        checksum = crc64nvme(_memory(source + start, length), checksum)
        copier()(to + start, source + start, length)
    return checksum


def _is_plain(destination: torch.Tensor, source: torch.Tensor) -> bool:
    alike = destination.shape == source.shape and destination.dtype == source.dtype
    return alike and is_memory(source) and is_memory(destination)


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in this process's memory, one after the other, as they are to be saved."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that `is_memory`, writable."""
    return _memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
