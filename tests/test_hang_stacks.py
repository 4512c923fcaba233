"""tests/support/hang_stacks.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS = '''
import signal, subprocess, sys

CHILD = """
import signal
def waits_for_what_never_comes():
    print("ready", flush=True)
    signal.pause()
waits_for_what_never_comes()
"""

def test_hangs():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # its time is over
            child.wait()
        finally:
            child.kill()
'''


def test_the_report_of_a_test_that_hangs_has_the_stacks_of_its_processes(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hang_stacks", "--timeout=100", "test_it.py"]
    env_path = Path(__file__).parent / "support"
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(env_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Timeout (>100.0s) from pytest-timeout" in done.stdout, done.stdout + done.stderr
    stacks = done.stdout.partition("Captured stacks")[2]
    assert "waits_for_what_never_comes (<string>:" in stacks, done.stdout
    assert "test_hangs (test_it.py:" in stacks
