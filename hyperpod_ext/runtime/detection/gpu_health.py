"""Checks NVIDIA GPUs, through NVML and the CUDA driver if they are installed. NVML and the driver are loaded only when
they are used.

NVML and the driver are opened once and stay open, because opening them takes longer than all queries together.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

from hyperpod_ext.runtime.detection.xid_codes import unhealthy_by


def unhealthy_reason() -> str | None:
    """Return why a GPU of this node should not be used; None if all GPUs are healthy, or if there is no GPU."""
    nvml = _nvml()
    if nvml is None:
        return None
    xids = _events(nvml)
    whys = {index: _of_one(nvml, index, xids.get(index, [])) for index in range(nvml.nvmlDeviceGetCount())}
    found = [f"GPU {index}: {why}" for index, why in whys.items() if why]
    if not found and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and (why := _context()):
        found = [why]
    return "; ".join(found) or None


@functools.cache
def _nvml() -> Any:
    """Return NVML after opening it; None on a machine without NVML or without a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _of_one(nvml: Any, index: int, xids: Sequence[int]) -> str | None:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        _corrected, _uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            return str(error)
        pending = failed = 0
    if failed:
        return "memory rows could not be remapped; the GPU must be replaced"
    action = _recovery_action(nvml, handle)
    if action is None and (why := _by_counters(nvml, handle, pending)) is not None:
        return why
    return unhealthy_by(action, xids)


def _recovery_action(nvml: Any, handle: Any) -> int | None:
    """Return the recovery action that the driver recommends for a GPU; None if the driver or `pynvml` is too old."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    try:
        answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except nvml.NVMLError:
        return None
    return int(answer.value.uiVal) if answer.nvmlReturn == nvml.NVML_SUCCESS else None


def _by_counters(nvml: Any, handle: Any, pending: int) -> str | None:
    """Return why a GPU is unhealthy, from its error counters; None if it is healthy. This check is for drivers that
    report no recovery actions.

    Any uncorrected error counts, because the counters do not show which errors were contained."""
    try:
        counter = nvml.NVML_VOLATILE_ECC
        errors = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:  # a GPU without ECC has no error counter
            return str(error)
        errors = 0
    if errors:
        return f"{errors} uncorrected memory errors (ECC)"
    return "memory rows wait to be remapped; the GPU must be reset" if pending else None


@functools.cache
def _event_set(nvml: Any) -> Any:
    """Return an event set that collects Xids (errors of the driver) from now on; None if the driver reports none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _events(nvml: Any) -> dict[int, list[int]]:
    """Return the Xids that were reported since the last call, by the GPU's index."""
    events = _event_set(nvml)
    found: dict[int, list[int]] = {}
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 0)
        except nvml.NVMLError:  # there are no more events
            break
        found.setdefault(nvml.nvmlDeviceGetIndex(event.device), []).append(int(event.eventData))
    return found


def _context() -> str | None:
    """Return why the CUDA driver does not start; None if it starts, or if there is no driver.

    The check opens no CUDA context, because each worker opens its own."""
    # After a process has initialized CUDA, its forked children cannot use a GPU. The agent may run this check, because
    # workers are forked not from the agent but from the fork server, which starts before the first check. Memory
    # servers use no GPU.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None  # NVML is installed without the driver
    code = driver.cuInit(0)
    if code in (0, 100):  # 0: the driver has started; 100: no GPU is visible
        return None
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"the CUDA driver does not start: {(name.value or b'').decode() or code}"
