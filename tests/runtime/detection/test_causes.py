"""What the end of a process means."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from hyperpod_ext.planner import advice_faults
from hyperpod_ext.runtime.detection.failure_causes import (
    CAUSES,
    NO_PROGRESS,
    Cause,
    FaultKind,
    OomKills,
    decode_exit,
    last_line,
    one_line,
    read_oom_kills,
)


@pytest.mark.parametrize(
    ("status", "more", "kind", "cause"),
    [
        (signal.SIGKILL, {}, "signal", "killed by SIGKILL (9)"),
        (
            signal.SIGKILL,
            {"oom": True},
            "out-of-memory",
            "killed by SIGKILL (9): by the kernel, because no memory was left",
        ),
        (signal.SIGTERM, {"oom": True}, "signal", "killed by SIGTERM (15)"),
        (signal.SIGBUS, {}, "signal", "killed by SIGBUS (7): no space left for a mapped file or /dev/shm"),
        (3 << 8, {}, "exit", "exit code 3"),
        (1 << 8, {"last_log_line": "ValueError: x (a.py:3)"}, "exit", "ValueError: x (a.py:3) (exit code 1)"),
        (1 << 8, {"last_log_line": "torch.OutOfMemoryError: CUDA out of memory"}, "out-of-memory", "torch.OutOfMemory"),
        (signal.SIGKILL, {"kill_reason": "hung in data of step 3"}, "hang", "hung in data of step 3"),
        (signal.SIGKILL, {"kill_reason": "no heartbeat for 9 s"}, "heartbeat", "no heartbeat for 9 s"),
        (41, {"kill_reason": "hung, before its handlers were there"}, "hang", "hung"),
    ],
)
def test_an_exit_is_told_in_words(status, more, kind, cause):
    fate = decode_exit(int(status), **more)
    assert fate.kind == kind
    assert fate.cause.startswith(cause)


def system(root: Path, cgroups: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"proc/self/cgroup": cgroups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


@pytest.mark.parametrize(
    ("cgroups", "files"),
    [
        ("0::/pod\n", {"cgroup/pod/memory.events": "oom 1\noom_kill 4\n"}),
        ("0::/pod\n", {"cgroup/memory.events": "oom_kill 4\n"}),  # a container sees its own as the root
        ("4:memory:/pod\n0::/\n", {"cgroup/memory/pod/memory.oom_control": "under_oom 0\noom_kill 4\n"}),
        ("0::/\n", {"proc/vmstat": "nr_free_pages 1\noom_kill 4\n"}),
    ],
)
def test_kills_for_want_of_memory_are_counted_by_either_kind_of_cgroup_or_the_machine(tmp_path, cgroups, files):
    assert read_oom_kills(*system(tmp_path, cgroups, files)) == 4


def test_only_new_kills_count(tmp_path):
    proc, cgroup = system(tmp_path, "0::/\n", {"cgroup/memory.events": "oom_kill 4\n"})
    kills = OomKills(proc, cgroup)
    assert not kills.since_last()
    (cgroup / "memory.events").write_text("oom_kill 5\n")
    assert kills.since_last()
    assert not kills.since_last()


# --- every kind of fault -----------------------------------------------------------------------------


def test_every_kind_of_fault_has_a_row_and_the_planner_knows_which_are_hangs() -> None:
    assert [cause.kind for cause in CAUSES] == list(get_args(FaultKind))
    assert advice_faults.HANGS == NO_PROGRESS == {"hang", "heartbeat", "stalled"}


def test_the_page_has_every_kind_of_fault(golden_part: Callable[[str, str, str], None]) -> None:
    golden_part("docs/faults.md", "kinds of faults", TABLE + "".join(map(row, CAUSES)))


TABLE = "| kind | event | content of `cause` | command to rehearse it |\n|---|---|---|---|\n"


def row(cause: Cause) -> str:
    """Of the table of kinds."""
    command = f"`hp-ext chaos JOB {cause.inject}`" if cause.inject else ""
    return f"| `{cause.kind}` | {cause.meaning} | {cause.reported} | {command} |\n"


def test_a_line_of_a_hundred_megabytes_is_no_last_word(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"first\n" + b"x" * (100 << 20) + b"\n\n")
    assert last_line(log).startswith("xxx")
    assert len(last_line(log)) < 1_100
    assert len(one_line(ValueError("y" * 10_000_000))) < 1_100
    log.write_text("ValueError: odd (train.py:3)\n\n")
    assert last_line(log) == "ValueError: odd (train.py:3)"
    assert last_line(tmp_path / "none.log") == ""
