"""Health of NVIDIA GPUs through NVML and the CUDA driver, as far as they are there. Imports both on use.

Both are opened once and kept: to open them takes longer than everything that is asked of them.
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
    """Why a GPU of this node should not be used; None where all are well, or there is none."""
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


def _of_one(nvml: Any, index: int, xids: Sequence[int]) -> str | None:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        _corrected, _uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            return str(error)
        pending = failed = 0
    if failed:
        return "memory rows could not be remapped; it must be replaced"
    action = _recovery_action(nvml, handle)
    if action is None and (why := _by_counters(nvml, handle, pending)) is not None:
        return why
    return unhealthy_by(action, xids)


def _recovery_action(nvml: Any, handle: Any) -> int | None:
    """What the driver asks for; None where it, or `pynvml`, is older than that."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    try:
        answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except nvml.NVMLError:
        return None
    return int(answer.value.uiVal) if answer.nvmlReturn == nvml.NVML_SUCCESS else None


def _by_counters(nvml: Any, handle: Any, pending: int) -> str | None:
    """Without a recovery action: errors that are contained cannot be told from others, so any one counts."""
    try:
        counter = nvml.NVML_VOLATILE_ECC
        errors = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:  # a GPU without ECC
            return str(error)
        errors = 0
    if errors:
        return f"{errors} uncorrected memory errors (ECC)"
    return "memory rows wait to be remapped; it must be reset" if pending else None


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


def _events(nvml: Any) -> dict[int, list[int]]:
    """Xids of what has come since this was asked last, by GPU."""
    events = _event_set(nvml)
    found: dict[int, list[int]] = {}
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 0)
        except nvml.NVMLError:  # nothing more
            break
        found.setdefault(nvml.nvmlDeviceGetIndex(event.device), []).append(int(event.eventData))
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
