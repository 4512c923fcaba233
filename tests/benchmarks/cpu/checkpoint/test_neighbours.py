from __future__ import annotations

import os
import signal
import subprocess

import waiting
from checkpoint.processes import Neighbours


def test_the_cpu_time_of_a_process_that_is_not_ours_is_a_neighbours():
    neighbours = Neighbours()
    burn = "sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!"  # its parent is gone at once
    burner = int(subprocess.run(["sh", "-c", burn], capture_output=True, check=True).stdout)
    try:
        waiting.until(lambda: neighbours.share() > 0)
        assert burner not in neighbours.ours()
    finally:
        os.kill(burner, signal.SIGKILL)


def test_what_we_start_is_no_neighbour():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert {os.getpid(), child.pid} <= set(Neighbours().ours())
        child.kill()
