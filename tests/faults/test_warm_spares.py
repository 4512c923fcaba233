"""A worker that dies is replaced by a process that has its CUDA context already."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from waiting import until

from hyperpod_ext.processes import descendants

pytestmark = pytest.mark.slow

GPUS = """
import os, torch
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda _: os.open(os.path.join(os.environ["HPX_TEST_SPARES"], "..", "device"), os.O_RDONLY)
torch.cuda.current_blas_handle = lambda: 0
def memory():
    os.close(os.open(os.path.join(os.environ["HPX_TEST_SPARES"], str(os.getpid())), os.O_CREAT))
    return 70 << 30, 80 << 30
torch.cuda.mem_get_info = memory
"""
"""Two GPUs, as far as a warm spare asks torch for them. It has a device open, as with CUDA; the last that it asks for
leaves a file named after it."""


def waits(pid: int) -> bool:
    """Whether a process sleeps: what a spare does once it has said that it is ready."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except FileNotFoundError:
        return False


def has_open(pid: int, file: Path) -> bool:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return file in [link.readlink() for link in links]


def test_a_warm_spare_becomes_the_worker_and_another_one_is_made(job, undisturbed, tmp_path):
    (tmp_path / "two_gpus.py").write_text(GPUS)
    spares, device = tmp_path / "spares", tmp_path / "device"
    spares.mkdir()
    device.touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    env = {"PYTHONPATH": path, "HPX_TEST_SPARES": str(spares), "HPX_TEST_HOLD": "[[1, 3, 5], [2, 0, 8]]"}
    preload = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "two_gpus"]
    running = job(settings={"restart": {"preload": preload, "warm_spares": True}}, env=env).start()

    def ready() -> set[int]:
        """Process ids of spares, once each of the two nodes has two."""
        return {pid for file in spares.iterdir() if waits(pid := int(file.name))} - workers

    workers: set[int] = set()
    for rank, step in ((3, 5), (0, 8)):
        running.until("step", step=step - 1, rank=rank)
        worker = running.until("worker_started", rank=rank)
        before = until(lambda: len(found := ready()) == 4 and found)
        os.kill(worker["pid"], signal.SIGKILL)
        started = running.until("worker_started", rank=rank, warm=True)
        assert started["pid"] in before
        workers.add(started["pid"])
        running.until("begun", rank=rank, generation=started["generation"])
        assert has_open(started["pid"], device)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert report["steps_lost"] == 0
    assert [pid for agent in running.agents for pid in descendants(agent.pid)] == []
    assert not [file.name for file in spares.iterdir() if waits(int(file.name))]
