"""Health of NVIDIA GPUs through NVML and the CUDA driver, as far as they are there. Imports both on use.

Both are opened once and kept: to open them takes longer than everything that is asked of them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import Any

_APPLICATIONS_OWN = frozenset({13, 31, 43, 45, 68})
"""Xids that a program causes by itself (a bad access, an abort): the GPU is well."""


def unhealthy_reason() -> str | None:
    """Why a GPU of this node should not be used; None where all are well, or there is none."""
    nvml = _nvml()
    if nvml is None:
        return None
    found = [why for index in range(nvml.nvmlDeviceGetCount()) if (why := _of_one(nvml, index))]
    found += [f"GPU {index}: Xid {xid}" for index, xid in _events(nvml) if xid not in _APPLICATIONS_OWN]
    if not found and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and (why := _context()):
        found = [why]
    return "; ".join(found) or None


@functools.cache
def _nvml() -> Any:
    """The opened library, or None on a machine without it or without a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _of_one(nvml: Any, index: int) -> str | None:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        counter = nvml.NVML_VOLATILE_ECC
        errors = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
        if errors:
            return f"GPU {index}: {errors} uncorrected memory errors (ECC)"
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:  # a GPU without ECC
            return f"GPU {index}: {error}"
    try:
        _corrected, _uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if failed:
            return f"GPU {index}: memory rows could not be remapped; it must be replaced"
        if pending:
            return f"GPU {index}: memory rows wait to be remapped; it must be reset"
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            return f"GPU {index}: {error}"
    return None


@functools.cache
def _event_set(nvml: Any) -> Any:
    """Collects Xids from the first check on; None where the driver does not tell them."""
    try:
        events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _events(nvml: Any) -> list[tuple[int, int]]:
    """GPU and Xid of what has come since this was asked last."""
    events, found = _event_set(nvml), []
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 0)
        except nvml.NVMLError:  # nothing more
            break
        found.append((nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)))
    return found


def _context() -> str | None:
    """Whether the CUDA driver starts and sees its GPUs; a context is opened by the workers, one a GPU."""
    # It may run in the agent, though no child of a process that has initialized CUDA can use a GPU: the agent forks no
    # worker. The fork server does, a process that is started before the first check; memory servers use no GPU.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None  # a machine with NVML alone
    code = driver.cuInit(0)
    if code in (0, 100):  # done, or no device is visible
        return None
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"the CUDA driver does not start: {(name.value or b'').decode() or code}"
