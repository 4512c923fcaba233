"""The example, as its first lines say to run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dcp_job import Job

from hyperpod_ext.processes import descendants

LOSS = re.compile(r"step (\d+), loss (\S+)")


def start(job: Job, root: Path, steps: int) -> subprocess.Popen[str]:
    environ = {**os.environ, "HPX_SOCKET_DIR": str(job.sockets), "XDG_STATE_HOME": str(job.directory)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(root / "examples" / "02-dcp" / "train.py"), "--steps", str(steps)]
    command += ["--durable", str(job.directory / "durable")]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.thorough  # more than 20 s
def test_killed_and_started_again_it_ends_where_it_would_have_ended(job: Job, root: Path) -> None:
    undisturbed, _ = start(job, root, 40).communicate(timeout=250)
    losses = dict(LOSS.findall(undisturbed))
    assert set(losses) == {"10", "20", "30", "40"}, undisturbed
    job.lose_memory()
    (job.directory / "durable").rename(job.directory / "aside")

    first = start(job, root, 40)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("step 20,"):
            break
    for pid in [first.pid, *(pid for pid in descendants(first.pid) if pid not in job.servers())]:
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    (pid,) = job.servers()  # it is still there, though all that knew it are gone
    again, _ = start(job, root, 40).communicate(timeout=250)
    made = dict(LOSS.findall(again))  # a job that is ended late has made more than 20 steps
    assert min(map(int, made)) > 20, again
    assert made == {step: loss for step, loss in losses.items() if int(step) >= min(map(int, made))}, again
    assert job.servers() == [pid]
