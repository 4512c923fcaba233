"""Copies of plain memory past the caches, where this machine could build them (see stream.c); else as ever."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.autograd.graph import increment_version

Copy = Callable[[int, int, int], object]
"""Address to copy to, address to copy from, bytes. Frees the GIL."""


@cache
def copier() -> Copy:
    """What copies memory here."""
    for built in sorted(Path(__file__).parent.glob("_stream*.so")):
        try:
            function = ctypes.CDLL(str(built)).hpx_copy
        except OSError:  # built for another kind of machine: a folder that is shared by several
            continue
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
        return function
    return ctypes.memmove


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """`destination.copy_(source)` of tensors of one shape and type, by the fastest way there is for this thread."""
    alike = destination.shape == source.shape and destination.dtype == source.dtype
    if torch.get_num_threads() == 1 and alike and is_memory(source) and is_memory(destination):
        copier()(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        increment_version(destination)  # a graph that has saved it is told, as `copy_` tells it
    else:  # several threads are faster than one that goes past the caches
        with torch.no_grad():
            destination.copy_(source)


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
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
