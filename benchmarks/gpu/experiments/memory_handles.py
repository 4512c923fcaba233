"""E10: GPU memory outlives the process that wrote it. One process creates it and passes a descriptor; a second maps
it, writes and is killed; a third maps it and finds the same bytes. On CPU an anonymous file stands for the GPU's
memory."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from lane import Lane
from results import Figure, Figures

_NBYTES = 64 << 20
"""A multiple of the 2 MiB in which the driver gives memory out."""
_PINNED, _ON_DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
CU_MEM_ACCESS_FLAGS_PROT_READWRITE of cuda.h"""


class _Memory(Protocol):
    def create(self) -> int:
        """A descriptor of new memory, which lives as long as this process."""

    def map(self, descriptor: int) -> None: ...

    def write(self, data: bytes) -> None: ...

    def read(self) -> bytes: ...


def run(lane: Lane) -> Figures:
    memory = _memory(lane.device)
    descriptor = memory.create()
    with _process(lane, "writer", descriptor) as writer:
        written = _line_of(writer)
        killed = time.monotonic()
        writer.kill()
        writer.wait()
    with _process(lane, "reader", descriptor) as reader:
        found = _line_of(reader)
        seconds = time.monotonic() - killed
        assert reader.wait(60) == 0
    assert found == written, "the memory has other bytes after the kill"
    mib = _NBYTES >> 20
    return {f"kill to {mib} MiB mapped and read by a new process, equal bytes": Figure(seconds, "s")}


def _process(lane: Lane, role: str, descriptor: int) -> subprocess.Popen[str]:
    """A process that gets the descriptor over a socket, as from a memory server."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), role, lane.device, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        socket.send_fds(ours, [b"."], [descriptor])
    return process


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait(60)}"
    return line


def _main(role: str, device: str, line: int) -> None:
    with socket.socket(fileno=line) as theirs:
        _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
    memory = _memory(device)
    memory.map(descriptor)
    if role == "writer":
        memory.write(random.Random(0).randbytes(_NBYTES))
    print(hashlib.sha256(memory.read()).hexdigest(), flush=True)
    if role == "writer":
        time.sleep(1000)  # it is killed here


def _memory(device: str) -> _Memory:
    return _CudaMemory() if device == "cuda" else _PlainMemory()


class _PlainMemory:
    """An anonymous file."""

    def create(self) -> int:
        descriptor = os.memfd_create("memory")
        os.ftruncate(descriptor, _NBYTES)
        return descriptor

    def map(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, _NBYTES)

    def write(self, data: bytes) -> None:
        self._mapping[:] = data

    def read(self) -> bytes:
        return self._mapping[:]


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _CudaMemory:
    """Memory of the driver's virtual memory management, on GPU 0."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(_ON_DEVICE, 0)
        self._address = ctypes.c_ulonglong()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: CUDA error {code}")

    def create(self) -> int:
        properties = _Properties(_PINNED, _POSIX_FD, self._location)
        handle, descriptor, size = ctypes.c_ulonglong(), ctypes.c_int(), ctypes.c_size_t(_NBYTES)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_ulonglong(0))
        kind, flags = ctypes.c_int(_POSIX_FD), ctypes.c_ulonglong(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, kind, flags)
        return descriptor.value

    def map(self, descriptor: int) -> None:
        handle, size = ctypes.c_ulonglong(), ctypes.c_size_t(_NBYTES)
        nothing, access = ctypes.c_ulonglong(0), _Access(self._location, _READ_WRITE)
        opened, kind = ctypes.c_void_p(descriptor), ctypes.c_int(_POSIX_FD)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), opened, kind)
        alignment = ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), size, alignment, nothing, nothing)
        self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), handle, nothing)
        self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def write(self, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", self._address, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

    def read(self) -> bytes:
        buffer = ctypes.create_string_buffer(_NBYTES)
        self._call("cuMemcpyDtoH_v2", buffer, self._address, ctypes.c_size_t(_NBYTES))
        return buffer.raw


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
