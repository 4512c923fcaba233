"""How fast the command line is beside `hyp`, AWS's own, on the same machine in the same minute."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from command import HP_EXT
from sdk_venvs import python_of

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(1200)]  # the first time it is installed

ROUNDS = 5


def seconds(command: list[str], home: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command, with nothing of this machine's own settings."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said.decode()[-2000:]
    return wall, usage.ru_utime + usage.ru_stime


def test_help_is_there_fifteen_times_sooner_than_with_hyp(tmp_path: Path) -> None:
    hyp = [str(python_of("hyp").with_name("hyp")), "--help"]
    seconds(hyp, tmp_path)  # byte code and caches are there for both
    seconds([HP_EXT, "--help"], tmp_path)
    theirs, ours = [], []
    for _ in range(ROUNDS):  # in turns, so that both meet the same load
        theirs.append(seconds(hyp, tmp_path))
        ours.append(seconds([HP_EXT, "--help"], tmp_path))
    (their_wall, their_cpu), (our_wall, our_cpu) = (
        [statistics.median(kind) for kind in zip(*side, strict=True)] for side in (theirs, ours)
    )
    print(
        f"hyp --help: {their_wall:.2f} s, CPU {their_cpu:.2f} s; hp-ext --help: {our_wall:.3f} s, CPU {our_cpu:.3f} s"
    )
    print(f"{their_wall / our_wall:.0f} times sooner, with {their_cpu / our_cpu:.0f} times less CPU")
    assert their_wall / our_wall >= 15
