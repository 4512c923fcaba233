"""What cannot work ends soon, says why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperpod_ext.runtime.ipc import messages as wire

TINY = Path(__file__).parent / "tiny.py"

pytestmark = pytest.mark.slow


def assert_nothing_left(pids: list[int]) -> None:
    """None of these processes runs any more, and so neither does the shared memory they held."""
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


def failed(report: dict[str, Any], code: str = "JobFailedError") -> str:
    """The message of a job that failed with this error."""
    assert report["state"] == "failed"
    assert report["error"]["code"] == code
    return str(report["error"]["message"])


def test_a_script_that_raises_at_once_is_not_tried_again(job):
    running = job(fault={"what": "script"}).start()
    report = running.wait()
    assert re.search(r"ValueError: the script itself is broken \(tiny\.py:\d+\) \(exit code 1\)", failed(report))
    assert "rank" in report["error"]["hint"]
    assert running.codes() == [7, 7]
    assert report["generations"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_nccl_without_a_gpu_is_not_tried_twice(job):
    report = job(settings={"process_group_backend": "nccl"}).start().wait()
    message = failed(report)
    assert "process_group_backend is 'nccl', and " in message
    assert "Remove process_group_backend" in report["error"]["hint"]
    assert len(report["faults"]) == 1


def test_a_scheduler_that_no_snapshot_holds_ends_the_job_by_name(job, tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(TINY.read_text().replace(", schedule=schedule)", ")"))
    running = job(script=script).start()
    report = running.wait()
    assert "schedule (StepLR) changes from step to step and is in no snapshot" in failed(report)
    assert report["error"]["hint"].startswith("Pass it to run.restore(schedule=...)")
    assert max(event["step"] for event in running.events() if event["event"] == "step") == 2


def test_an_exception_at_the_first_step_is_tried_once_more(job):
    report = (
        job(fault={"what": "exception", "rank": -1, "ranks": [0, 1, 2, 3], "step": 1, "always": True}).start().wait()
    )
    message = failed(report)
    assert "ValueError: bad sample at step 1 (tiny.py:" in message
    assert "2 times in a row" in message
    assert report["generations"] == 2


def test_shared_memory_that_is_too_small_is_said_before_a_worker_starts(job):
    running = job(settings={"shared_memory_mib": 1 << 30}).start()
    assert "/dev/shm has" in failed(running.wait())
    assert not (running.folder / "logs").exists()


def test_a_port_that_is_taken_is_named(job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = job(nodes=1, port=port).start().wait()
    assert f"127.0.0.1:{port}" in failed(report, "ConflictError")


def test_a_module_that_cannot_be_preloaded_is_named(job):
    report = job(settings={"restart": {"preload": ["torch", "no_such_module"]}}).start().wait()
    assert "cannot import 'no_such_module', which restart.preload asks for" in failed(report)


def test_a_rank_that_ends_before_the_others_is_named(job, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(f"import os, runpy\nif os.environ['RANK'] != '1':\n    runpy.run_path({str(TINY)!r})\n")
    report = job(script=script).start().wait()
    assert "rank 1 ended without calling its @resilient function" in failed(report)


def test_a_script_without_our_loop_runs_as_under_torchrun(job, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "assert x.item() == 4\n"
        "dist.destroy_process_group()\n"
    )
    running = job(script=script).start()
    assert running.wait()["state"] == "succeeded"
    assert running.codes() == [0, 0]


def test_a_second_call_of_the_training_function_is_refused(job, tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(f"import runpy\nrunpy.run_path({str(TINY)!r})['train']()\n")
    report = job(script=script).start().wait()
    said = r"ended with exit code 1 after its training was done: JobFailedError: .* \(twice.py:2\)"
    assert re.search(said, failed(report))


def test_a_script_that_is_edited_while_the_job_runs_is_told_of(job, tmp_path):
    """A new process runs what the file is then; the others run what it was."""
    script = tmp_path / "edited.py"
    script.write_text(f"import runpy\nrunpy.run_path({str(TINY)!r}, run_name='__main__')\n")
    env = {"HPX_TEST_HOLD": json.dumps([[1, 0, 4]]), "HPX_CHAOS": "sigkill:rank=1,step=6"}
    running = job(script=script, env=env).start()
    running.until("step", step=3)
    script.write_text(script.read_text() + "# changed\n")
    (running.folder / "let-go").touch()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    (warning,) = report["warnings"]
    assert "rank 1 started with another version" in warning


def test_a_script_that_opens_a_process_group_itself_is_told_not_to(job, tmp_path):
    script = tmp_path / "opens.py"
    script.write_text(
        f"import runpy, torch.distributed as dist\ndist.init_process_group('gloo')\nrunpy.run_path({str(TINY)!r})\n"
    )
    report = job(script=script).start().wait()
    assert "a process group is open already" in failed(report)
    assert "Remove init_process_group" in report["error"]["hint"]


def test_a_rank_that_does_not_leave_in_time_is_replaced(job, undisturbed):
    """Rank 0 sits in a sleep while rank 2 dies: nobody waits for it longer than the job says."""
    settings = {"restart": {"leave_timeout_s": 1.5}}
    report = job(settings=settings, fault={"what": "sleeps", "rank": 0, "step": 5, "dies": 2}).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_job_that_is_told_to_stop_leaves_nothing_behind(job, signum):
    own = tempfile.mkdtemp(prefix="t", dir="/tmp")  # short, for the paths of sockets
    running = job(env={"HPX_TEST_STEPS": "100000", "TMPDIR": own}).start()
    running.until("step", step=3)
    pids = running.processes()
    assert len(list(Path(own).glob("hpx-*"))) == 2, "each agent has its sockets there"
    assert len(pids) >= 2 + 2 * 4  # two agents, each with a fork server, a memory server and two workers
    for agent in running.agents:
        agent.send_signal(signum)
    assert running.wait()["state"] == "cancelled"
    assert running.codes()[0] == 130
    assert_nothing_left(pids)
    Path(own).rmdir()  # nothing is left in it


def test_an_agent_that_is_killed_takes_its_node_with_it_and_without_a_spare_the_job(job):
    running = job(env={"HPX_TEST_STEPS": "100000"}, settings={"restart": {"node_wait_s": 0.5}}).start()
    running.until("step", step=3)
    pids = running.processes()
    running.agents[1].send_signal(signal.SIGKILL)
    assert failed(running.wait()).startswith("node 1 is lost at step ")
    assert all(_ended(pid) for pid in pids)


def _ended(pid: int) -> bool:
    """Wait for a process that the kernel was asked to end; False if it still runs after 10 s."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def is_refused(intruder: socket.socket) -> bool:
    """Whether the connection ends, with nothing said but that."""
    said = wire.receive(intruder)
    return said is None or (said == {"refused": True} and wire.receive(intruder) is None)


def test_who_does_not_have_the_secret_is_not_let_in(job):
    running = job(env={"HPX_TEST_HOLD": "[[1, 0, 4]]"}).start()
    running.until("step", step=3)
    not_ascii = '{"nonce": 1, "proof": "é"}'.encode()
    for strange in (len(not_ascii).to_bytes(4, "big") + not_ascii, (4096).to_bytes(4, "big") + b"[" * 4096):
        with socket.create_connection(("127.0.0.1", running.port)) as intruder:
            wire.receive(intruder)
            intruder.sendall(strange)
            assert is_refused(intruder)
    with socket.create_connection(("127.0.0.1", running.port)) as intruder:
        wire.receive(intruder)
        wire.send(intruder, {"nonce": "n", "proof": "let me in"})
        wire.send(intruder, {"type": "failed", "rank": 0, "cause": "because I say so", "step": 3, "generation": 1})
        with suppress(ConnectionResetError):  # which of the two it is depends on whether all of it had been read
            assert is_refused(intruder)
    (running.folder / "let-go").touch()
    report = running.wait()
    assert report["state"] == "succeeded"
    assert report["generations"] == 1


def test_a_network_interface_that_is_not_there_is_said_before_anything_starts(job):
    running = job(settings={"network": {"interface": "hpx-none0"}}).start()
    assert set(running.codes()) == {7}
    assert "network.interface is hpx-none0, which has no IP address" in running.logs()
    assert "Interfaces here are lo" in running.logs()


def test_the_interface_that_a_job_names_is_used_and_reported(job):
    report = (
        job(
            settings={
                "network": {"interface": "lo"},
                "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "peer", "every_steps": 1}]},
            }
        )
        .start()
        .wait()
    )
    assert report["state"] == "succeeded"
    assert report["network"] == {str(node): {"interface": "lo", "address": "127.0.0.1"} for node in range(2)}
