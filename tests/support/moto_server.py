"""moto's server in an environment of its own, one for a whole test run."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

import pytest
from sdk_venvs import python_of

from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import die_with_parent


@cache
def endpoint() -> str:
    """Its URL. Skips the test where there can be none, and fails it under CI."""
    python = python_of("moto")
    port = free_port()
    place = Path(tempfile.mkdtemp(prefix="hpx-moto-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    log = place / "log"
    parent = os.getpid()
    with log.open("wb") as opened:
        process = subprocess.Popen(
            [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=os.environ | {"MOTO_EC2_LOAD_DEFAULT_AMIS": "false"},  # two thousand, and again for each reset
            stdout=opened,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent),
        )
    atexit.register(process.kill)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).close()
            return f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"moto does not start: {log.read_text()[-500:]}")
