"""Training that nothing saves is warned of before its first step, by real jobs of scripts of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import unprotected_scripts as scripts

from hyperpod_ext.runtime.events.of_training import UNPROTECTED

pytestmark = pytest.mark.slow

KINDS = scripts.OURS_IS_ABSENT | scripts.OURS_IS_UNUSED


def written(folder: Path, files: dict[str, str]) -> Path:
    """Return the script, with its modules."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder / "train.py"


def log_of(running: Any, rank: int) -> list[str]:
    """Return the lines that a rank printed."""
    return (running.folder / "logs" / f"rank{rank}.log").read_text().splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_unprotected_training_is_warned_of_before_its_first_step(job: Any, tmp_path: Path, kind: str) -> None:
    running = job(nodes=1, script=written(tmp_path / "source", KINDS[kind])).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    lines = log_of(running, 0)
    (at,) = (index for index, line in enumerate(lines) if UNPROTECTED in line)
    assert at < lines.index("step 1 is made")
    assert lines.index("step 1 is made") < lines.index("step 3 is made")
    assert not any(UNPROTECTED in line for line in log_of(running, 1)), "rank 0 warns for all"
    (event,) = (event for event in running.events() if event["event"] == "unprotected_step")
    assert (event["rank"], event["node"]) == (0, 0)
    assert [UNPROTECTED in warning for warning in report["warnings"]] == [True]


def test_a_training_loop_outside_of_run_steps_is_refused_before_its_first_step(job: Any, tmp_path: Path) -> None:
    running = job(nodes=1, script=written(tmp_path / "source", scripts.OUTSIDE_STEPS)).start()
    report = running.wait()
    assert report["state"] == "failed"
    assert "SGD.step() was called before the first step of run.steps" in report["error"]["message"]
    assert not any("is made" in line for line in [*log_of(running, 0), *log_of(running, 1)])


def test_protected_training_is_not_warned_of(job: Any, tmp_path: Path) -> None:
    """Neither is a process that replaces a killed one."""
    env = {"HPX_CHAOS": "sigkill:rank=0,step=3"}
    running = job(nodes=1, script=written(tmp_path / "source", scripts.PROTECTED), env=env).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["steps"], len(report["recoveries"])) == (6, 1)
    assert not any(event["event"] == "unprotected_step" for event in running.events())
    assert not any(UNPROTECTED in line for line in [*log_of(running, 0), *log_of(running, 1)])
    assert not any(UNPROTECTED in warning for warning in report["warnings"])


@pytest.mark.parametrize("mode", ["plain", "run"])
def test_other_modes_are_not_warned_of(job: Any, tmp_path: Path, mode: str) -> None:
    """`plain` asks for no protection, and `run` has its own."""
    running = job(nodes=1, script=written(tmp_path / "source", scripts.PLAIN), settings={"mode": mode}).start()
    assert running.wait()["warnings"] == []
    assert not any(UNPROTECTED in line for line in log_of(running, 0))
