"""What an Xid asks for."""

from __future__ import annotations

import pytest

from hyperpod_ext.runtime.detection.xid_codes import RECOVERY_ACTIONS, XIDS, Remedy, unhealthy_by


def codes(remedy: Remedy) -> set[int]:
    return {xid.code for xid in XIDS if xid.remedy is remedy}


def test_the_table_has_what_nvidias_catalog_has():
    assert codes(Remedy.RESTART_PROCESS) == {13, 31, 43, 45, 68, 94}
    assert codes(Remedy.RESET_GPU) == {64, 95, 119, 120}
    assert codes(Remedy.REBOOT_NODE) == {79}
    assert codes(Remedy.ASK_DRIVER) == {48, 63, 154}


@pytest.mark.parametrize("xid", XIDS, ids=lambda xid: str(xid.code))
def test_only_a_processs_own_error_leaves_the_gpu_in_use(xid):
    assert (unhealthy_by(None, [xid.code]) is None) == (xid.remedy is Remedy.RESTART_PROCESS)
    assert unhealthy_by(0, [xid.code]) is None  # the driver asks for nothing


@pytest.mark.parametrize("action", [action for action in range(8) if action])
def test_every_other_action_of_the_driver_takes_it_out_of_use(action: int):
    why = unhealthy_by(action, [])
    assert why is not None
    assert RECOVERY_ACTIONS.get(action, str(action)) in why


def test_each_error_is_told():
    assert unhealthy_by(None, [119, 31, 79]) == (
        "Xid 119: its firmware does not answer; the GPU must be reset; "
        "Xid 79: it has fallen off the bus; the node must be rebooted"
    )
