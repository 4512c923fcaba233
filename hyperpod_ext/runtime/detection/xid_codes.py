"""What to do about errors of the NVIDIA driver (Xids), and about recovery actions that the driver recommends (NVML).

Pure tables. Sources: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors, "mnemonic" and "immediate action"), and
the recovery actions in `nvml.h`, which drivers from version 570 on report. The tables are not yet tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Remedy(Enum):
    """Action that is needed after an Xid."""

    RESTART_PROCESS = "the process is restarted; the GPU is healthy"
    RESET_GPU = "the GPU must be reset"
    REBOOT_NODE = "the node must be rebooted"
    ASK_DRIVER = "the driver's recovery action says what to do"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the NVIDIA driver can report."""

    code: int
    mnemonic: str
    """Name of the error in NVIDIA's catalog."""
    meaning: str
    remedy: Remedy


XIDS = (
    Xid(13, "ROBUST_CHANNEL_GR_EXCEPTION", "a kernel raised an exception", Remedy.RESTART_PROCESS),
    Xid(31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "a kernel read or wrote a bad address", Remedy.RESTART_PROCESS),
    Xid(43, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "a process was stopped on the GPU", Remedy.RESTART_PROCESS),
    Xid(45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "a process ended with work on the GPU", Remedy.RESTART_PROCESS),
    Xid(48, "ROBUST_CHANNEL_GPU_ECC_DBE", "uncorrectable memory error (ECC)", Remedy.ASK_DRIVER),
    Xid(63, "INFOROM_PAGE_RETIREMENT_EVENT", "a memory row waits to be remapped", Remedy.ASK_DRIVER),
    Xid(64, "INFOROM_PAGE_RETIREMENT_FAILURE", "a memory row could not be remapped", Remedy.RESET_GPU),
    Xid(68, "ROBUST_CHANNEL_NVDEC0_ERROR", "the video decoder raised an exception", Remedy.RESTART_PROCESS),
    Xid(79, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "it has fallen off the bus", Remedy.REBOOT_NODE),
    Xid(94, "ROBUST_CHANNEL_CONTAINED_ERROR", "memory error (ECC) of one process", Remedy.RESTART_PROCESS),
    Xid(95, "ROBUST_CHANNEL_UNCONTAINED_ERROR", "memory error (ECC) beyond one process", Remedy.RESET_GPU),
    Xid(119, "GSP_RPC_TIMEOUT", "its firmware does not answer", Remedy.RESET_GPU),
    Xid(120, "GSP_ERROR", "its firmware failed", Remedy.RESET_GPU),
    Xid(154, "GPU_RECOVERY_ACTION_CHANGED", "the driver's recovery action changed", Remedy.ASK_DRIVER),
)
"""The Xids that occur in training jobs."""

RECOVERY_ACTIONS = {
    0: "",
    1: "the GPU must be reset",
    2: "the node must be rebooted",
    3: "traffic between GPUs must end before the driver is asked again",
    4: "the GPU works at reduced capacity and must be reset when its work is done",
}
"""Text for each number of `NVML_GPU_RECOVERY_ACTION_*`; empty if no action is needed. The meanings of numbers from 5 on
differ between versions of NVML."""

_BY_CODE = {xid.code: xid for xid in XIDS}


def unhealthy_by(action: int | None, xids: Iterable[int]) -> str | None:
    """Return why a GPU should not be used; None if it may be used.

    If the driver reports a recovery action, the Xids are ignored, because the driver knows better what to do.

    Args:
        action: number of the recovery action; None if this driver does not report one.
    """
    if action is not None:
        return _by_action(action)
    return "; ".join(why for code in xids if (why := _by_xid(code))) or None


def _by_action(action: int) -> str | None:
    wanted = RECOVERY_ACTIONS.get(action, f"recovery action {action}, which is not known here")
    return f"its driver says: {wanted}" if wanted else None


def _by_xid(code: int) -> str | None:
    xid = _BY_CODE.get(code)
    if xid is None:  # most Xids that `_BY_CODE` does not list need a decision by a person
        return f"Xid {code}, which is not known here"
    if xid.remedy is Remedy.RESTART_PROCESS:
        return None
    wanted = "this driver does not say what to do" if xid.remedy is Remedy.ASK_DRIVER else xid.remedy.value
    return f"Xid {code}: {xid.meaning}; {wanted}"
