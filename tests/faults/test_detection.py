"""A rank that hangs is found out, tells where it hung, and is replaced; those that wait for it stay."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SOON = {"floor_s": 5.0, "factor": 3.0, "first_step_s": 20.0, "heartbeat_s": 20.0}
"""The script's steps take milliseconds, so this is the limit."""


def injected(text: str, **hang: Any) -> dict[str, Any]:
    return {"env": {"HPX_CHAOS": text}, "settings": {"restart": {"hang": {**SOON, **hang}}}}


def assert_recovered(undisturbed: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The one recovery of a run that is equal to the undisturbed one."""
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
    assert report["steps_lost"] == 0
    (recovery,) = report["recoveries"]
    return dict(recovery)


@pytest.mark.parametrize(
    ("how", "phase"),
    [("stop", "forward"), ("deadlock", "backward"), ("loop", "optimizer"), ("gil", "data"), ("deadlock", "checkpoint")],
)
def test_a_rank_that_hangs_is_replaced_and_no_other_is(job, undisturbed, how, phase):
    running = job(**injected(f"hang:rank=2,step=6,phase={phase},how={how}")).start()
    report = running.wait()
    recovery = assert_recovered(undisturbed, report)
    fault = recovery["fault"]
    assert (fault["rank"], fault["node"], fault["step"], fault["phase"], fault["kind"]) == (2, 1, 6, phase, "hang")
    assert fault["cause"].startswith(f"hung in {phase} of step 6, no progress for ")
    assert recovery["survivor_pids_kept"]
    assert recovery["phases"]["fault_seen"] > SOON["floor_s"]
    log = (running.folder / "logs/rank2.log").read_text()
    assert "which will be killed because it hangs" in log
    assert "from_worker.py" in log.partition("which will be killed because it hangs")[2]  # the very line it hung in
    assert "Traceback" not in log


def test_a_rank_0_that_breaks_a_rule_on_what_it_prints_is_replaced_and_no_other_is(job, undisturbed):
    rule = {"name": "link", "pattern": ".*link is down", "fault_on_match": True}
    prints = {
        "what": "code",
        "where": "in a step",
        "rank": 0,
        "step": 5,
        "code": "print('the link is down', flush=True)",
    }
    env = {"HPX_TEST_HOLD": "[[1, 0, 5]]"}
    recovery = assert_recovered(undisturbed, job(fault=prints, env=env, settings={"log_rules": [rule]}).start().wait())
    fault = recovery["fault"]
    assert (fault["rank"], fault["step"], fault["kind"]) == (0, 5, "log-rule")
    assert fault["cause"].startswith("log rule link: rank 0 printed 'the link is down', which is a fault")
    assert recovery["survivor_pids_kept"]


def test_a_job_of_one_rank_is_watched_too(job):
    running = job(nodes=1, workers_per_node=1, **injected("hang:rank=0,step=6,how=deadlock")).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["recoveries"][0]["fault"]["kind"] == "hang"


def test_a_process_that_is_silent_outside_of_a_step_is_replaced(job, undisturbed):
    """Stopped while it starts, where no step says how long it may take."""
    silent = injected("", heartbeat_s=5.0)
    silent["env"]["HPX_TEST_HOLD"] = "[[1, 1, 1]]"  # it comes no further before it is stopped
    running = job(**silent).start()
    pid = running.until("groups_open", rank=1)
    pid = next(e["pid"] for e in running.events() if e["event"] == "joined" and e["rank"] == 1)
    os.kill(pid, signal.SIGSTOP)
    report = running.wait()
    recovery = assert_recovered(undisturbed, report)
    assert recovery["fault"]["rank"] == 1
    assert recovery["fault"]["kind"] in ("heartbeat", "hang")


def test_a_slow_rank_is_not_taken_for_one_that_hangs(job, undisturbed):
    report = job(**injected("slow:rank=1,step=4,seconds=0.4,steps=2")).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["recoveries"] == []
    assert report["weights"] == undisturbed["weights"]


def test_two_ranks_that_hang_at_once_are_both_replaced(job, undisturbed):
    report = job(**injected("hang:rank=0,step=6;hang:rank=3,step=6")).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert {fault["rank"] for fault in report["faults"]} == {0, 3}


def sleep(*ranks: int, **restart: Any) -> dict[str, Any]:
    """These ranks sleep in step 6 each time that comes."""
    settings = {"restart": {"hang": SOON, **restart}}
    return {
        "fault": {"what": "sleeps", "rank": -1, "ranks": ranks, "step": 6, "dies": -1, "always": True},
        "settings": settings,
    }


def test_a_hang_that_comes_again_ends_the_job_with_its_place(job):
    report = job(**sleep(2)).start().wait()
    assert report["state"] == "failed"
    assert [fault["kind"] for fault in report["faults"]] == ["hang"] * 3
    told = (
        r"rank 2 \(node 1\) at step 6: hung in data of step 6, no progress for \S+ s \(tiny.py:\d+\); 3 times in a row"
    )
    assert re.fullmatch(told, report["error"]["message"])


def test_where_all_ranks_hang_again_and_again_the_last_word_is_of_that(job):
    report = job(**sleep(0, 1, 2, 3, leave_timeout_s=1.0)).start().wait()
    assert report["state"] == "failed"
    assert [fault["kind"] for fault in report["faults"] if fault["kind"] != "stuck"] == ["stalled"] * 3
    told = r"rank 0 \(node 0\) at step 6: ranks 0, 1, 2, 3 make no progress for \S+ s in data of step 6, "
    told += r"and none is behind the others; 3 times in a row. Rank \d did not leave generation 2 .* \(tiny.py:\d+\)\."
    assert re.fullmatch(told, report["error"]["message"])


def test_a_rank_whose_connections_end_does_not_stop_the_job(job, undisturbed):
    running = job(**injected("cut-network:rank=1,step=6,phase=backward")).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert running.until("collective_broke")["step"] == 6
    assert report["recoveries"][0]["fault"]["kind"] == "connection", "nobody is lost, so no lease need run out"
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]


@pytest.mark.parametrize(
    ("text", "kind", "cause"),
    [
        ("exception:rank=1,step=5,phase=backward", "exception", "InjectedError: an injected exception in backward"),
        ("sigkill:rank=1,step=5,phase=optimizer", "signal", "killed by SIGKILL (9)"),
        ("sigsegv:rank=1,step=5,phase=rest", "signal", "killed by SIGSEGV (11): a crash in native code"),
        ("oom:rank=1,step=5,phase=forward", "out-of-memory", "allocate memory"),
    ],
)
def test_a_fault_tells_rank_node_step_phase_and_cause(job, undisturbed, text, kind, cause):
    report = job(env={"HPX_CHAOS": text}).start().wait()
    fault = assert_recovered(undisturbed, report)["fault"]
    assert (fault["rank"], fault["node"], fault["step"], fault["kind"]) == (1, 0, 5, kind)
    assert fault["phase"] == text.partition("phase=")[2]
    assert cause in fault["cause"]


def test_a_crash_leaves_its_python_stack_in_the_log(job):
    running = job(env={"HPX_CHAOS": "sigsegv:rank=1,step=5"}).start()
    assert running.wait()["state"] == "succeeded"
    assert "Fatal Python error: Segmentation fault" in (running.folder / "logs/rank1.log").read_text()


@pytest.mark.measures
def test_a_kill_is_noticed_before_the_memory_of_the_process_is_given_back(job, undisturbed):
    env = {"HPX_TEST_BALLAST_MIB": "1024", "HPX_CHAOS": "slow:rank=2,step=6,seconds=1"}
    running = job(env=env).start()
    pid = running.until("joined", rank=2)["pid"]
    running.until("step", step=5)
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([process], [], [])
    gone = time.monotonic()
    os.close(process)
    seen = running.until("fault")
    assert seen["t"] < gone
    assert (seen["rank"], seen["cause"]) == (2, "killed by SIGKILL (9)")
    assert_recovered(undisturbed, running.wait())
