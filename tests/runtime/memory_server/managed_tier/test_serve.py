"""The server as a process of its own: its command line, and who may reset it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECRET = b"0123456789abcdef0123456789abcdef"
COMMAND = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server.managed_tier"]


@contextmanager
def serving(*arguments: str, secret: Path | None = None) -> Iterator[int]:
    """Port of a server on the loopback."""
    environ = {name: value for name, value in os.environ.items() if name != "HPX_SECRET_FILE"}
    environ |= {"HPX_SECRET_FILE": str(secret)} if secret else {}
    command = [*COMMAND, "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"served on http://127\.0\.0\.1:(\d+)$", said)
        assert found, said
        yield int(found[1])
    finally:
        process.terminate()
        process.communicate()


def ask(port: int, method: str, path: str, body: bytes | None = None, token: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (path := tmp_path / "secret").touch(mode=0o600)
    path.write_bytes(SECRET)
    return path


def test_a_job_s_secret_admits_to_a_reset_and_the_budget_holds(secret: Path) -> None:
    with serving("--budget-mib", "1", secret=secret) as port:
        assert ask(port, "POST", "/v1/cp/namespaces/job?num_ranks=2") == 200
        assert ask(port, "POST", "/v1/cp/checkpoints/job/0/1", bytes(1 << 20)) == 200
        assert ask(port, "POST", "/v1/cp/checkpoints/job/1/1", b"one more") == 507
        assert ask(port, "POST", "/v1/cp/cluster/reset") == 401
        token = hmac.new(SECRET, b"cluster/reset", hashlib.sha256).hexdigest()
        assert ask(port, "POST", "/v1/cp/cluster/reset", token=token) == 200
        assert ask(port, "GET", "/v1/cp/namespaces/job") == 404


def test_without_a_secret_nobody_may_reset_unless_all_may() -> None:
    with serving() as port:
        assert ask(port, "POST", "/v1/cp/cluster/reset", token="anything") == 401
    with serving("--open-reset") as port:
        assert ask(port, "POST", "/v1/cp/cluster/reset") == 200


def test_a_port_in_use_is_told_in_one_line() -> None:
    with serving() as port:
        done = subprocess.run([*COMMAND, "--listen", f"127.0.0.1:{port}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot listen on 127.0.0.1 port {port}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--listen", "9200"], ["--listen", "h:x"], ["--listen", "h:1", "--budget-mib", "0"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not" in done.stderr
