"""What makes a node unfit for a worker."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.config.detection import HealthPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.detection import gpu_health, health
from hyperpod_ext.runtime.detection.health import HealthContext, examine, examine_until_fit


def context(run_dir: Path, **more: Any) -> HealthContext:
    policy = {name: more.pop(name) for name in list(more) if name in HealthPolicy.model_fields}
    restart = RestartPolicy(health=HealthPolicy(**policy))
    tiers = more.pop("tiers", (MemoryTier(),))
    checkpoint = CheckpointPolicy(tiers=tiers)
    config = RuntimeConfig(name="j", nodes=1, workers_per_node=1, restart=restart, checkpoint=checkpoint)
    return HealthContext(config, run_dir, more.pop("address", "127.0.0.1"), **more)


def test_this_machine_is_well(tmp_path: Path):
    found = asyncio.run(examine(context(tmp_path)))
    assert found.unhealthy == {}


def test_a_disk_without_room_is_said_with_the_folder(tmp_path: Path):
    found = asyncio.run(examine(context(tmp_path, disk_mib=1 << 40)))
    assert f"{tmp_path} has " in found.unhealthy["disk"]
    assert "restart.health.disk_mib" in found.sentence()


def test_a_job_that_has_begun_trains_on_without_a_disk(tmp_path: Path):
    found = asyncio.run(examine(context(tmp_path, disk_mib=1 << 40, begun=True)))
    assert found.unhealthy == {}


def test_a_file_tier_is_looked_at_where_it_will_be(tmp_path: Path):
    (tmp_path / "tier").write_text("in the way")
    tier = FileTier(path=str(tmp_path / "tier" / "below"))
    assert health.disk(context(tmp_path, tiers=(MemoryTier(), tier))) is not None


def test_shared_memory_that_is_not_there(tmp_path: Path):
    assert "does not exist" in str(health.shared_memory(context(tmp_path, shm=tmp_path / "shm")))


def test_what_is_full_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = ["/dev/shm is full", "/dev/shm is full", None]
    monkeypatch.setattr(health, "CHECKS", {"shared-memory": lambda context: answers.pop(0)})
    found = asyncio.run(examine_until_fit(context(tmp_path, checks=("shared-memory",), timeout_s=60.0)))
    assert (found.unhealthy, answers) == ({}, [])


def test_what_stays_full_makes_a_node_unfit_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "CHECKS", {"shared-memory": lambda context: "/dev/shm is full"})
    found = asyncio.run(examine_until_fit(context(tmp_path, checks=("shared-memory",), timeout_s=0.3)))
    assert found.unhealthy == {"shared-memory": "/dev/shm is full"}


def test_what_is_not_a_matter_of_room_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = ["no network", None]
    checks = {"network": lambda context: answers.pop(0), "disk": lambda context: "full"}
    monkeypatch.setattr(health, "CHECKS", checks)
    found = asyncio.run(examine_until_fit(context(tmp_path, checks=("network", "disk"))))
    assert (found.unhealthy, answers) == ({"network": "no network", "disk": "full"}, [None])


def interfaces(root: Path, **states: str) -> Path:
    for name, state in states.items():
        (root / name).mkdir(parents=True)
        (root / name / "operstate").write_text(state + "\n")
    return root


def test_a_network_interface_that_is_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    net = interfaces(tmp_path / "net", lo="unknown", eth0="down", eth1="up")
    there = {"address": "10.0.0.1", "net": net}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert health.network(context(tmp_path, **there)) is None  # one of them is up
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert health.network(context(tmp_path, **there)) == "no network interface is up: eth0 is down"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "there is no network interface eth7; there are: eth0, eth1, lo" in str(
        health.network(context(tmp_path, **there))
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert health.network(context(tmp_path, net=net)) is None  # over loopback


@pytest.mark.parametrize(
    ("value", "ailment"),
    [
        ("eth", None),  # a prefix: eth0 and eth1, and one of them is up
        ("ib,eth1", None),  # what is not there does not matter where another is
        ("=eth1", None),
        ("eth1:5000", None),  # with a port
        ("^docker,lo,veth,eth0", None),  # `^` holds for the whole list
        ("^=eth,lo", None),  # nothing is called eth
        ("^lo,docker", None),
        ("eth0", "no network interface is up: eth0 is down"),
        ("^lo,eth1,docker", "no network interface is up: eth0 is down"),
        ("^eth1,docker", "no network interface is up: eth0 is down"),  # no other node comes by way of loopback
        ("=eth", "no network interface matches NCCL_SOCKET_IFNAME (=eth); there are: docker0, eth0, eth1, lo"),
        ("ib", "no network interface matches NCCL_SOCKET_IFNAME (ib); there are: docker0, eth0, eth1, lo"),
        (
            "^docker,lo,veth,eth",
            "no network interface matches NCCL_SOCKET_IFNAME (^docker,lo,veth,eth); there are: docker0, eth0, eth1, lo",
        ),
    ],
)
def test_a_choice_of_interfaces_is_read_as_nccl_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, ailment: str | None
):
    net = interfaces(tmp_path / "net", lo="unknown", docker0="down", eth0="down", eth1="up")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert health.network(context(tmp_path, address="10.0.0.1", net=net)) == ailment


@pytest.mark.parametrize("value", ["^lo", "^docker,lo,veth,eth"])
def test_over_loopback_it_does_not_matter_what_nccl_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
):
    net = interfaces(tmp_path / "net", lo="unknown", eth0="down")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert health.network(context(tmp_path, net=net)) is None


def test_a_check_of_ones_own_is_called_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("own_checks")
    module.fans = lambda context: f"fans of {context.config.name} stand still"  # type: ignore[attr-defined]

    def breaks(context: HealthContext) -> None:
        raise OSError("no such sensor")

    module.breaks = breaks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_checks", module)
    found = asyncio.run(examine(context(tmp_path, checks=("own_checks:fans", "own_checks:breaks", "disk"))))
    assert found.unhealthy == {
        "own_checks:fans": "fans of j stand still",
        "own_checks:breaks": "OSError: no such sensor",
    }


def test_a_check_that_does_not_come_back_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    module = types.ModuleType("slow_checks")
    module.stuck = lambda context: released.wait() and None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_checks", module)
    found = asyncio.run(examine(context(tmp_path, checks=("slow_checks:stuck",), timeout_s=0.2)))
    released.set()
    assert found.unhealthy == {"slow_checks:stuck": "no answer within 0.2 s"}


@pytest.mark.parametrize("name", ["disc", "json:no_such_check", "no_such_module:check"])
def test_a_check_that_is_not_there_is_named(tmp_path: Path, name: str):
    with pytest.raises(JobFailedError, match=name):
        asyncio.run(examine(context(tmp_path, checks=(name,))))


class DriverError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Value(ctypes.Union):
    """`nvmlValue_t`: the recovery action is its `unsigned int`, whatever the other bytes are."""

    _fields_ = (("dVal", ctypes.c_double), ("uiVal", ctypes.c_uint), ("ullVal", ctypes.c_ulonglong))


def field_value(nvml_return: int, action: int) -> Any:
    """`nvmlFieldValue_t` as `nvmlDeviceGetFieldValues` fills it; of an action that is not asked it leaves the value."""
    value = Value(ullVal=0xDEADBEEF << 32 | action)
    return types.SimpleNamespace(fieldId=230, valueType=1, nvmlReturn=nvml_return, value=value)


def driver(**gpu: Any) -> types.ModuleType:
    """A stand-in of NVIDIA's library with one GPU."""
    module = types.ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=DriverError,
        NVML_SUCCESS=0,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        nvmlEventTypeXidCriticalError=8,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlDeviceGetTotalEccErrors=lambda *_: gpu.get("ecc", 0),
        nvmlDeviceGetRemappedRows=lambda _: gpu.get("rows", (0, 0, 0, 0)),
        nvmlEventSetCreate=object,
        nvmlDeviceRegisterEvents=lambda *_: None,
        nvmlDeviceGetIndex=lambda _: 0,
    )
    if "action" in gpu:  # `pynvml` from 570 on
        answers = {230: [field_value(*gpu["action"])]}
        module.__dict__.update(
            NVML_FI_DEV_GET_GPU_RECOVERY_ACTION=230, nvmlDeviceGetFieldValues=lambda _, fields: answers[fields[0]]
        )
    xids = list(gpu.get("xids", ()))

    def wait(_events: object, _timeout: int) -> Any:
        if not xids:
            raise DriverError(10)
        return types.SimpleNamespace(device="gpu0", eventData=xids.pop(0))

    module.nvmlEventSetWait_v2 = wait  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("gpu", "ailment"),
    [
        ({}, None),
        ({"ecc": 2}, "GPU 0: 2 uncorrected memory errors (ECC)"),
        ({"rows": (1, 0, 1, 0)}, "GPU 0: memory rows wait to be remapped; the GPU must be reset"),
        ({"rows": (1, 0, 0, 1)}, "GPU 0: memory rows could not be remapped; the GPU must be replaced"),
        ({"xids": [79]}, "GPU 0: Xid 79: it has fallen off the bus; the node must be rebooted"),
        ({"xids": [13, 43]}, None),  # a program's own fault
        ({"xids": [94]}, None),
        ({"xids": [94, 95]}, "GPU 0: Xid 95: memory error (ECC) beyond one process; the GPU must be reset"),
        ({"xids": [63]}, "GPU 0: Xid 63: a memory row waits to be remapped; this driver does not say what to do"),
        ({"xids": [149]}, "GPU 0: Xid 149, which is not known here"),
        ({"action": (0, 0)}, None),
        ({"action": (0, 0), "xids": [63, 94], "ecc": 1, "rows": (0, 1, 1, 0)}, None),  # contained, says the driver
        (
            {"action": (0, 0), "rows": (0, 1, 0, 1)},
            "GPU 0: memory rows could not be remapped; the GPU must be replaced",
        ),
        ({"action": (0, 1), "xids": [13]}, "GPU 0: its driver says: the GPU must be reset"),
        ({"action": (0, 2)}, "GPU 0: its driver says: the node must be rebooted"),
        ({"action": (0, 5)}, "GPU 0: its driver says: recovery action 5, which is not known here"),
        ({"action": (3, 1)}, None),  # a driver that does not know the question leaves what was there
        ({"action": (3, 0), "ecc": 2}, "GPU 0: 2 uncorrected memory errors (ECC)"),
    ],
)
def test_a_gpu_that_is_ill(monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], ailment: str | None):
    monkeypatch.setitem(sys.modules, "pynvml", driver(**gpu))
    for cached in (gpu_health._nvml, gpu_health._event_set):
        cached.cache_clear()
    try:
        assert gpu_health.unhealthy_reason() == ailment
    finally:
        for cached in (gpu_health._nvml, gpu_health._event_set):
            cached.cache_clear()
