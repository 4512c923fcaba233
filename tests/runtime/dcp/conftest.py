"""Fixtures of this folder's tests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that the tests share

from dcp_job import ForkServer, Job


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    found = ForkServer()
    yield found
    found.close()


@pytest.fixture
def job(fork_server: ForkServer) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as scratch:  # short, for the paths of sockets
        (Path(scratch) / "sockets").mkdir(mode=0o700)
        found = Job(fork_server, Path(scratch))
        yield found
        found.close()
