"""A real Slurm on this machine, with several nodes: munged, slurmctld and a slurmd for each node.

Debian's build lets many slurmd run on one machine. Each has a UTS namespace, so that it answers to its own host name,
and a mount namespace with an /etc/hosts of its own; nothing outside the given folder is changed. Needs root, and
`apt-get install slurm-wlm munge libslurm-dev gcc libc6-dev`: a machine without them skips these tests and says so;
under CI the packages are installed, and what still lacks is a failure.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from debian import cannot_run, install_under_ci

from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import die_with_parent

PACKAGES = ("slurm-wlm", "munge", "libslurm-dev", "gcc", "libc6-dev")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "munged", "gcc", "unshare", "mount")
PLUGIN = Path(__file__).with_name("slurm_auto_resume.c")
_START_S = 30.0

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.sock,cred_expire=10
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
PlugStackConfig={place}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=5
SlurmdTimeout=10
KillWait=10
MinJobAge=300
JobRequeue=1
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT CPUs=8 RealMemory=16000 State=UNKNOWN
{nodes}
PartitionName=dev Nodes=hpx[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """A running cluster."""

    place: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.place / "slurm.conf"

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        env = os.environ | {"SLURM_CONF": str(self.conf)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=100).stdout

    def start(self, name: str, *command: str) -> None:
        parent = os.getpid()
        with (self.place / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=os.environ | {"SLURM_CONF": str(self.conf)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def start_node(self, name: str) -> None:
        inside = 'mount --bind "$2" /etc/hosts && hostname "$1" && exec slurmd -D -c -N "$1"'
        self.start(name, "unshare", "--uts", "--mount", "sh", "-c", inside, "sh", name, str(self.place / "hosts"))

    def stop(self) -> None:
        for name in sorted(self.processes, key=lambda name: name == "munged"):  # the others say goodbye through it
            self.processes[name].terminate()
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(5)
            self.processes[name].kill()
            self.processes[name].wait()
        for file in self.place.glob("slurmd.*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def require() -> None:
    """Skip where there can be no Slurm; fail under CI."""
    lacking = _lacking()
    if lacking:
        install_under_ci(*PACKAGES)
        lacking = _lacking()
    if lacking:
        cannot_run(f"Slurm cannot run here: {lacking}")


def _lacking() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing or not Path("/usr/include/slurm/spank.h").exists():
        return f"apt-get install {' '.join(PACKAGES)}"
    if os.geteuid() != 0 or subprocess.run(["unshare", "--uts", "--mount", "true"], check=False).returncode != 0:
        return "namespaces need root"
    return ""


@contextmanager
def slurm_cluster(place: Path, count: int, more: str = "") -> Iterator[SlurmCluster]:
    """A cluster of nodes hpx1, hpx2, ... in `place`; idle when it is given out. `more`: further lines of slurm.conf."""
    require()
    cluster = SlurmCluster(place)
    _write_files(place, count, more)
    try:
        key = ["--key-file", str(place / "munge.key"), "--socket", str(place / "munge.sock"), "--num-threads=2"]
        own = [f"--{kind}-file={place}/munged.{kind}" for kind in ("pid", "log", "seed")]
        cluster.start("munged", "munged", "--foreground", "--force", *key, *own)
        _wait(cluster, lambda: (place / "munge.sock").exists())
        cluster.start("slurmctld", "slurmctld", "-D", "-c")
        for number in range(1, count + 1):
            cluster.start_node(f"hpx{number}")
        _wait(cluster, lambda: _idle(cluster) == count)
        yield cluster
    finally:
        cluster.stop()


def _write_files(place: Path, count: int, more: str) -> None:
    for folder in ("state", *(f"spool/hpx{number}" for number in range(1, count + 1))):
        (place / folder).mkdir(parents=True)
    (place / "munge.key").write_bytes(secrets.token_bytes(128))
    (place / "munge.key").chmod(0o400)
    ports = [free_port() for _ in range(count + 1)]
    nodes = [
        f"NodeName=hpx{number} NodeHostname=hpx{number} NodeAddr=127.0.77.{number} Port={ports[number]}"
        for number in range(1, count + 1)
    ]
    fill = {"host": socket.gethostname(), "port": ports[0], "place": place, "nodes": "\n".join(nodes), "count": count}
    (place / "slurm.conf").write_text(CONF.format(**fill) + more)
    # naming a plugin skips a search that ends slurmd where /sys/fs/cgroup is not mounted
    (place / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={place}/cgroup\n")
    hosts = [f"127.0.77.{number} hpx{number}\n" for number in range(1, count + 1)]
    (place / "hosts").write_text(Path("/etc/hosts").read_text() + "\n" + "".join(hosts))
    plugin = place / "auto_resume.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(PLUGIN)], check=True, timeout=60)
    (place / "plugstack.conf").write_text(f"required {plugin}\n")


def _idle(cluster: SlurmCluster) -> int:
    try:
        return sum(int(number) for number in cluster.ask("sinfo", "-h", "-p", "dev", "-t", "idle", "-o", "%D").split())
    except subprocess.CalledProcessError:
        return 0  # the controller does not answer yet


def _wait(cluster: SlurmCluster, ready: object) -> None:
    assert callable(ready)
    deadline = time.monotonic() + _START_S
    while not ready():
        dead = [name for name, process in cluster.processes.items() if process.poll() is not None]
        if dead or time.monotonic() > deadline:
            logs = "".join(f"\n{log.name}: {log.read_text()[-500:]}" for log in sorted(cluster.place.glob("*.log")))
            pytest.fail(f"Slurm did not start; ended: {dead}{logs}")
        time.sleep(0.05)
