"""What a node checks before its workers start, and what memory it may take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError, UnreachableError
from hyperpod_ext.runtime.detection.preflight import check_node, check_tiers
from hyperpod_ext.runtime.ipc.environment import read_secret
from hyperpod_ext.runtime.memory_server.slots.host_memory import usable_bytes

CONFIG = RuntimeConfig(name="j", nodes=1, workers_per_node=1)
THIS = Path(__file__)


def test_a_node_that_has_all_passes():
    check_node(CONFIG, THIS)


def test_everything_that_is_missing_is_said_at_once():
    with pytest.raises(JobFailedError) as caught:
        check_node(CONFIG.model_copy(update={"shared_memory_mib": 1 << 30}), THIS.with_name("no.py"))
    assert "no.py: no such script" in str(caught.value)
    assert "the job asks for 1073741824 (shared_memory_mib)" in str(caught.value)
    assert "docker run --shm-size" in str(caught.value)


def test_shared_memory_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(JobFailedError, match="does not exist"):
        check_node(CONFIG.model_copy(update={"shared_memory_mib": 1}), THIS, shm=tmp_path / "shm")


def test_a_tier_that_cannot_be_written_is_said_before_training(tmp_path: Path):
    policy = CheckpointPolicy(tiers=(MemoryTier(), FileTier(path=str(tmp_path / "tier"))))
    config = CONFIG.model_copy(update={"checkpoint": policy})
    check_tiers(config)
    shutil.rmtree(tmp_path / "tier")
    (tmp_path / "tier").write_text("in the way")
    with pytest.raises(UnreachableError, match="tier/j"):
        check_tiers(config)


def fake_system(root: Path, *, available_kib: int, limits: dict[str, tuple[str, int]]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with these numbers; `limits` maps a cgroup to (memory.max, memory.current)."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available_kib} kB\n")
    (proc / "self/cgroup").write_text("0::/pods/pod1\n")
    for name, (limit, current) in limits.items():
        (cgroup / name).mkdir(parents=True, exist_ok=True)
        (cgroup / name / "memory.max").write_text(limit + "\n")
        (cgroup / name / "memory.current").write_text(f"{current}\n")
    return proc, cgroup


def test_without_a_container_the_machine_is_the_limit(tmp_path: Path):
    assert usable_bytes(*fake_system(tmp_path, available_kib=1000, limits={})) == int(0.95 * 1000 * 1024)


def test_the_tightest_cgroup_above_is_the_limit(tmp_path: Path):
    limits = {"pods/pod1": ("max", 0), "pods": ("5000", 3000)}
    assert usable_bytes(*fake_system(tmp_path, available_kib=1000, limits=limits)) == int(0.95 * 2000)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    for mode in (0o644, 0o640, 0o604, 0o660):
        secret.chmod(mode)
        with pytest.raises(HyperpodExtError, match=f"readable by other users .mode {mode:o}"):
            read_secret(secret)
    secret.chmod(0o600)
    assert read_secret(secret) == b"0123456789abcdef"
    secret.write_text("short")
    with pytest.raises(HyperpodExtError, match="too short"):
        read_secret(secret)
    with pytest.raises(HyperpodExtError, match="cannot read the job's secret"):
        read_secret(tmp_path / "none")


AS_USER = """
import os, sys
from pathlib import Path
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.ipc.environment import read_secret
os.setgroups([2000])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    print(read_secret(Path(sys.argv[1])).decode())
except HyperpodExtError as error:
    print(error, error.hint)
"""


@pytest.mark.parametrize(
    ("user", "group", "mode", "said"),
    [
        (1000, 2000, 0o440, "0123456789abcdef"),  # as the kubelet leaves it where the pod has an fsGroup of 2000
        (0, 2000, 0o440, "0123456789abcdef"),
        (1000, 0, 0o400, "needs fsGroup in its pod's securityContext"),
        (1000, 2000, 0o444, "readable by other users"),
        (1000, 2000, 0o460, "readable by other users"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become user 1000")
def test_a_pod_reads_the_secret_through_its_fs_group(user: int, group: int, mode: int, said: str):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        secret = Path(folder) / "secret"
        secret.write_text("0123456789abcdef")
        os.chown(secret, 0, group)
        secret.chmod(mode)
        done = subprocess.run([sys.executable, "-c", AS_USER, secret, str(user)], capture_output=True, text=True)
    assert said in done.stdout, done.stderr
