"""A script written for AWS's client runs against the memory server as it is, and falls back to S3 without it.

The client has no public way to be told an address, so each of its processes has a hosts file of its own, in a mount
namespace of its own, in which AWS's name stands for a loopback address. S3 is found by AWS_ENDPOINT_URL: the client's
library for S3 uses path-style requests of its own accord where that is a number.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aws_client_env
import pytest
import s3_server
import whole_run
from venv_over_ours import UnavailableError
from waiting import PATIENCE_S

from hyperpod_ext.ports import free_port
from hyperpod_ext.runtime.memory_server.managed_tier.tier import ManagedTier

HERE = Path(__file__).parent
WORLD_SIZE = 2
SERVER = ["-m", "hyperpod_ext.runtime.memory_server.managed_tier"]
EVERY_CALL = """
import sys
import xxhash
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.storage.clients.inmemory import inmemory_client
from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import InMemoryClientError, InMemoryServerError

def raises(error, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except error as raised:
        return str(raised)
    raise AssertionError(f"{call} did not raise {error}")

config = InMemoryClientConfig(base_url=sys.argv[1])
client = inmemory_client.InMemoryCheckpointClient("calls", rank="1", world_size="2", config=config, steps_retained=2)
assert client.get_namespace_config() == {}
assert client.get_latest_checkpoints() == []
assert client.get_checkpoint(step=1) is None
wanted = {"num_ranks": 3, "steps_to_retain_per_rank": 2}
assert client.get_or_create_namespace() == client.get_or_create_namespace() == wanted
client.put_checkpoint(step=1, data=b"shard" * 100_000)
client.put_checkpoint(step=1, data=b"metadata", metadata_index=0)
client.put_checkpoint(step=2, data=b"", rank=0)
assert client.get_checkpoint(step="1") == b"shard" * 100_000
assert client.get_checkpoint(step=1, metadata_index=0) == b"metadata"
assert client.get_checkpoint(step=2, rank=0) == b""
assert client.get_latest_checkpoints(limit=1) == [2]
assert client.get_latest_checkpoints() == [2, 1]
client.delete_checkpoint(step=1)
assert client.get_checkpoint(step=1) is None
assert "is not below num_ranks=3" in raises(InMemoryClientError, client.put_checkpoint, step=3, data=b"", rank=3)
assert "no room for" in raises(InMemoryServerError, client.put_checkpoint, step=3, data=bytes(65 << 20))
inmemory_client.hash_xxh3_128 = lambda data: xxhash.xxh3_128_digest(b"other")
assert "do not match the xxh3_128" in raises(InMemoryClientError, client.put_checkpoint, step=3, data=b"data")
assert "needs `Authorization: Bearer`" in raises(InMemoryClientError, client.reset_cluster)
client.delete_namespace()
assert client.get_namespace_config() == {}
"""


def unavailable(reason: str) -> NoReturn:
    """Skip, but fail where everything should be available."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def aws_python() -> Path:
    """An interpreter with AWS's client, on top of ours so that torch is not fetched again. Made once."""
    try:
        return Path(whole_run.once("aws-client", lambda: str(aws_client_env.install())))
    except UnavailableError as error:
        unavailable(f"AWS's client: {error}")


@pytest.fixture(scope="session")
def private_mounts() -> list[str]:
    """The command that starts another with mounts of its own."""
    candidates = [["unshare", "-m"], ["unshare", "-rm"]]
    for candidate in candidates[os.geteuid() != 0 :] if shutil.which("unshare") else []:
        if (
            subprocess.run([*candidate, "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True).returncode
            == 0
        ):
            return candidate
    unavailable(
        "this user may not have mounts of its own (`unshare -rm` fails; kernel.apparmor_restrict_unprivileged_userns?)"
    )


@pytest.fixture
def host() -> str:
    """A loopback address that no other test run uses."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


@pytest.fixture
def memory_server(aws_python: Path, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """Where AWS's client looks for it. Has `xxhash`, so that it verifies what it is sent."""
    port = urlsplit(ManagedTier.AWS_URL).port
    process = subprocess.Popen([str(aws_python), *SERVER, "--listen", f"{host}:{port}", "--budget-mib", "64"])
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            urllib.request.urlopen(f"http://{host}:{port}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.02)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait()


class Runner:
    """Runs the script's ranks to their end, each where AWS's name is `host`."""

    def __init__(self, python: Path, mounts: list[str], host: str, place: Path, s3: str, bucket: str) -> None:
        self.logs = place / "log"
        self.logs.mkdir()
        hosts = place / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{host} {urlsplit(ManagedTier.AWS_URL).hostname}\n")
        bind = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /var/log && shift 2 && exec "$@"'
        self._command = [*mounts, "sh", "-c", bind, "sh", str(hosts), str(self.logs)]
        self._command += [str(python), str(HERE / "aws_script.py")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._environ = clean | s3_server.CREDENTIALS | {"AWS_ENDPOINT_URL": s3, "AWS_EC2_METADATA_DISABLED": "true"}
        self._environ |= {"TRAINING_JOB_NAME": "aws-job", "S3_BASE_PATH": f"s3://{bucket}/checkpoints"}
        self._environ |= {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self._environ |= {"AWS_DEFAULT_REGION": "us-east-1"}

    def __call__(self, *arguments: str) -> dict[tuple[str, int], set[str]]:
        """What each rank printed of its state, by what it did and at which step."""
        port = free_port()
        ranks = []
        for rank in range(WORLD_SIZE):
            environ = self._environ | {"RANK": str(rank), "MASTER_PORT": str(port)}
            command = [*self._command, *arguments]
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        said: dict[tuple[str, int], set[str]] = {}
        try:
            outputs = [process.communicate(timeout=60) for process in ranks]
            assert all(process.returncode == 0 for process in ranks), "\n\n".join(err[-4000:] for _, err in outputs)
            for out, _ in outputs:
                for line in out.splitlines():
                    what, _, state = line.partition(": step ")
                    step, _, sums = state.partition(" ")
                    said.setdefault((what, int(step)), set()).add(sums)
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return said


@pytest.fixture
def run(aws_python: Path, private_mounts: list[str], host: str, tmp_path: Path) -> Any:
    s3 = s3_server.endpoint()
    runner = Runner(aws_python, private_mounts, host, tmp_path, s3, s3_server.new_bucket(s3))
    return runner


@pytest.mark.slow
def test_every_call_of_aws_s_client(aws_python: Path, memory_server: subprocess.Popen[bytes], host: str) -> None:
    command = [str(aws_python), "-c", EVERY_CALL, f"http://{host}:{urlsplit(ManagedTier.AWS_URL).port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)  # the first run on a machine installs the client and the S3 server
def test_aws_script_saves_loads_and_falls_back_to_s3(run: Runner, memory_server: subprocess.Popen[bytes]) -> None:
    saved = run("train")
    assert {key: len(ranks) for key, ranks in saved.items()} == {("saved", 10): WORLD_SIZE, ("saved", 20): WORLD_SIZE}

    loaded = run("load", "10", "latest", "20")
    assert loaded == {
        ("loaded 10", 10): saved["saved", 10],
        ("loaded latest", 20): saved["saved", 20],
        ("loaded 20", 20): saved["saved", 20],
    }
    memory_server.terminate()
    memory_server.wait()
    assert run("load", "latest") == {("loaded latest", 20): saved["saved", 20]}

    log = (run.logs / "sagemaker_checkpointing" / "aws-job_checkpointing.log").read_text()
    with_memory, _, without = log.partition("Connection error")
    assert "ERROR" not in with_memory.rpartition("\n")[0]  # all came from memory
    assert "In-memory read failed" in without
