"""Who hangs: the limit learned from steps, and the one that the others wait for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import fill, mounted

from hyperpod_ext.config.detection import HangPolicy
from hyperpod_ext.runtime.detection.hangs import Heartbeat, StepTimes, find_hung, quantile, silent_too_long
from hyperpod_ext.runtime.detection.heartbeat import HeartbeatPage, Phase
from hyperpod_ext.runtime.detection.stacks import line_in_script
from hyperpod_ext.runtime.ipc import control_messages
from hyperpod_ext.runtime.ipc.declared import encode

POLICY = HangPolicy(floor_s=2.0, factor=10.0, first_step_s=100.0, heartbeat_s=30.0)


def sign(rank: int, phase: Phase = Phase.BACKWARD, **more: object) -> Heartbeat:
    fields = {"generation": 1, "step": 5, "collectives": 7, "quiet_s": 9.0, "silent_s": 0.1, **more}
    return Heartbeat(rank=rank, phase=phase, **fields)  # type: ignore[arg-type]


def world(*signs: Heartbeat) -> dict[int, Heartbeat]:
    return {one.rank: one for one in signs}


NO_ROOM = """
import sys
from pathlib import Path
from hyperpod_ext.runtime.detection.death_watch import LivenessLock
from hyperpod_ext.runtime.detection.heartbeat import HeartbeatPage, Phase
page = HeartbeatPage.create(Path(sys.argv[1]) / "heartbeat")
LivenessLock(Path(page.path)).prepare()
HeartbeatPage.of(page.path).mark(Phase.FORWARD)
page.order()
print(page.read().phase.word)
"""


def test_a_heartbeat_needs_no_room_on_a_disk(tmp_path: Path) -> None:
    """A page of a file that the disk has no room for ends each process that touches it, with SIGBUS."""
    with mounted(tmp_path / "disk", "16k") as disk:
        fill(disk)
        done = subprocess.run([sys.executable, "-c", NO_ROOM, disk], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "forward\n"), done.stderr


def test_the_limit_follows_the_jobs_own_slow_steps():
    times = StepTimes(POLICY)
    assert times.limit_s(Phase.DATA, first=True) == 100.0
    times.add(6.0, first=True)
    assert times.limit_s(Phase.DATA, first=False) == 60.0  # no other step is known yet
    for _ in range(90):
        times.add(0.5, first=False)
    assert times.limit_s(Phase.DATA, first=False) == 5.0
    assert times.limit_s(Phase.DATA, first=True) == 60.0
    assert times.limit_s(Phase.DONE, first=False) == 100.0


def test_one_accident_does_not_raise_the_limit_and_regular_slow_steps_do():
    times = StepTimes(POLICY)
    for step in range(100):
        times.add(50.0 if step == 30 else 0.5, first=False)
    assert times.limit_s(Phase.FORWARD, first=False) == 5.0
    for step in range(100):
        times.add(3.0 if step % 10 == 0 else 0.5, first=False)
    assert times.limit_s(Phase.FORWARD, first=False) == 30.0


def test_fast_steps_do_not_go_below_the_floor():
    times = StepTimes(POLICY)
    times.add(0.001, first=False)
    assert times.limit_s(Phase.REST, first=False) == POLICY.floor_s


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.95, 4), (0.01, 1), (1.0, 4)])
def test_quantiles(share, value):
    assert quantile([4, 1, 3, 2], share) == value


def test_nobody_is_to_blame_while_anyone_makes_progress_within_the_limit():
    assert find_hung(world(sign(0, quiet_s=1.0), sign(1, quiet_s=1.9)), 2, 2.0) is None


def test_the_one_that_is_behind_is_ended_and_not_those_that_wait():
    signs = world(sign(0), sign(1, Phase.DATA), sign(2), sign(3))
    hang = find_hung(signs, 4, 2.0)
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.cause == "hung in data of step 5, no progress for 9.0 s"


@pytest.mark.parametrize("others", [1, 3])
def test_a_rank_that_returned_early_is_named_as_what_the_others_wait_for(others: int):
    """As by `if rank == 0: return`: those that wait for it are behind it."""
    waiting = [sign(rank, Phase.REST) for rank in range(1, 1 + others)]
    hang = find_hung(world(sign(0, Phase.DONE, quiet_s=1.0), *waiting), 1 + others, 2.0)
    assert hang is not None
    assert hang.cause.endswith("; rank 0 has returned from its training function in step 5")


def test_within_one_phase_fewer_collectives_tell():
    hang = find_hung(world(sign(0), sign(1), sign(2, collectives=6), sign(3)), 4, 2.0)
    assert hang is not None
    assert hang.ranks == (2,)


def test_a_step_behind_is_behind_whatever_the_phase():
    hang = find_hung(world(sign(0, step=6), sign(1, Phase.CHECKPOINT), sign(2, step=6)), 3, 2.0)
    assert hang is not None
    assert hang.ranks == (1,)


@pytest.mark.parametrize("ailment", [{"stopped": True}, {"silent_s": 5.0}])
def test_a_frozen_process_is_to_blame_even_where_others_are_behind(ailment):
    signs = world(sign(0, collectives=6), sign(1, collectives=6), sign(2, Phase.REST, **ailment))
    hang = find_hung(signs, 3, 2.0)
    assert hang is not None
    assert hang.ranks == (2,)


def test_with_nobody_behind_all_leave_and_none_is_ended():
    hang = find_hung(world(*(sign(rank) for rank in range(4))), 4, 2.0)
    assert hang is not None
    assert hang.ranks == ()
    assert "none is behind" in hang.cause


def test_a_single_rank_is_its_own_culprit():
    hang = find_hung(world(sign(0)), 1, 2.0)
    assert hang is not None
    assert hang.ranks == (0,)


def test_half_of_the_ranks_behind_the_others_are_those_who_hang():
    behind = [sign(rank, Phase.FORWARD) for rank in (0, 1)]
    hang = find_hung(world(*behind, *(sign(rank, Phase.REST) for rank in (2, 3))), 4, 2.0)
    assert hang is not None
    assert hang.ranks == (0, 1)


def test_a_rank_that_evaluates_while_others_wait_gets_more_time_but_not_for_ever():
    waiting = [sign(rank, Phase.REST) for rank in (1, 2, 3)]
    assert find_hung(world(sign(0, Phase.FORWARD, quiet_s=0.1), *waiting), 4, 2.0) is None
    late = [sign(rank, Phase.REST, quiet_s=21.0) for rank in (1, 2, 3)]
    hang = find_hung(world(sign(0, Phase.FORWARD, quiet_s=0.1), *late), 4, 2.0)
    assert hang is not None
    assert hang.ranks == (0,)


def test_nothing_is_said_while_a_rank_is_away_or_in_another_generation():
    assert find_hung(world(sign(0), sign(1, Phase.DATA)), 3, 2.0) is None
    assert find_hung(world(sign(0), sign(1, Phase.DATA, generation=2)), 2, 2.0) is None


def test_silence_alone_is_enough_after_the_heartbeat_limit():
    assert silent_too_long(sign(0, silent_s=29.0), POLICY) == ""
    assert "runs no Python code" in silent_too_long(sign(0, silent_s=31.0), POLICY)
    assert "stopped by a signal" in silent_too_long(sign(0, silent_s=31.0, stopped=True), POLICY)


def test_signs_travel_as_json():
    one = sign(3, Phase.OPTIMIZER, stopped=True)
    assert Heartbeat.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("phase", Phase)
def test_an_agent_can_report_a_rank_in_any_phase(phase):
    reported = control_messages.RankHeartbeat(**sign(0, phase).to_json())
    assert Heartbeat.from_json(encode(reported)).phase is phase


def test_a_phase_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="phase"):
        control_messages.RankHeartbeat(**sign(0).to_json() | {"phase": max(Phase) + 1})


def test_a_heartbeat_is_read_by_another_process_and_outlives_its_writer(tmp_path: Path):
    page = HeartbeatPage.create(tmp_path / "rank0.heartbeat")
    assert page.read().marks == 0
    script = (
        "import os, sys\n"
        "from hyperpod_ext.runtime.detection.heartbeat import Phase, HeartbeatPage\n"
        "pulse = HeartbeatPage.of(sys.argv[1])\n"
        "pulse.generation, pulse.step = 2, 7\n"
        "pulse.mark(Phase.DATA)\n"
        "pulse.mark(Phase.FORWARD)\n"
        "pulse.beat(5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "rank0.heartbeat")], check=False)
    reading = page.read()
    assert (reading.marks, reading.generation, reading.step) == (2, 2, 7)
    assert (reading.phase, reading.collectives) == (Phase.FORWARD, 5)
    before = page.orders
    page.order()
    assert page.orders != before


def test_the_line_of_the_script_is_found_among_the_stacks_of_all_threads(tmp_path):
    log = tmp_path / "rank1.log"
    log.write_text('Current thread 0x0 (most recent call first):\n  File "/job/before.py", line 1 in train\n')
    before = log.stat().st_size
    assert line_in_script(log, before) == ""
    library = Path(pytest.__file__)
    with log.open("a") as file:
        file.write(
            "--- stack of every thread of process 7\n"
            'Thread 0x1 (most recent call first):\n  File "/job/other.py", line 3 in read\n\n'
            f'Current thread 0x2 (most recent call first):\n  File "{library}", line 9 in call\n'
            '  File "/job/train.py", line 57 in loss_of\n  File "/job/train.py", line 80 in train\n'
        )
    assert line_in_script(log, before) == "train.py:57"
