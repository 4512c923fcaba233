"""Debian's packages that some tests need: a person is told of them, under CI they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import NoReturn

import pytest


def install_under_ci(*packages: str, timeout_s: float = 300.0) -> None:
    """Install packages where that is wanted and can be: under CI, as root. Whoever asks looks whether it helped."""
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *command], capture_output=True, timeout=timeout_s, check=False)


def cannot_run(why: str) -> NoReturn:
    """Skip the test on a machine where it cannot run, and say why; fail it under CI."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
