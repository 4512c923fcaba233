"""One recovery of each side, on this machine: start the job, have one worker killed, read what happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from recovery_report import Recovery, Stamp, our_recovery, torchrun_recovery

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.processes import kill_descendants
from hyperpod_ext.runtime.events.reading import read_events
from hyperpod_ext.runtime.events.report import kept_steps

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "01-local" / "job.yaml"
TIMEOUT_S = 300.0
_POLL_S = 0.002

FAIR = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # without these two, torchrun does not recover here at all, or waits for the resolver while it starts
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""Environment of both sides."""


@dataclass(frozen=True)
class Setup:
    """What both sides train, and where it is struck."""

    job: JobConfig
    steps: int
    width: int
    layers: int
    kill_rank: int
    kill_step: int
    save_every: int = 5
    device: str = "cpu"
    """torch's name of what torchrun's ranks train on."""

    def hp_ext_command(self) -> list[str]:
        arguments = json.dumps([f"--{name}={getattr(self, name)}" for name in ("steps", "width", "layers")])
        command = ["hp-ext", "create-job", "-f", "examples/01-local/job.yaml", "--target", "local", "--wait"]
        command += ["--kill", f"rank={self.kill_rank}@step={self.kill_step}"]
        return [*command, "--set", "chaos.compare=false", "--set", f"args={arguments}", "-o", "json"]

    def torchrun_command(self, folder: str = "FOLDER") -> list[str]:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(self.job.world_size), "--max-restarts", "3"]
        return [*command, "benchmarks/cpu/torchrun_train.py", *self.arguments(folder)]

    def arguments(self, folder: str = "FOLDER") -> list[str]:
        """What a peer's script is given."""
        assert self.job.global_batch_size is not None
        arguments = ["--folder", folder, "--save-every", str(self.save_every), "--device", self.device]
        for name in ("steps", "width", "layers"):
            arguments += [f"--{name}", str(getattr(self, name))]
        share = self.job.global_batch_size // self.job.world_size
        return [*arguments, "--batch-size", str(share), "--seed", str(self.job.seed)]


class SideError(Exception):
    """A side did not do what was to be measured."""


def measure_ours(setup: Setup, scratch: Path) -> Recovery:
    """The example, on two local nodes, through the command line."""
    home = scratch / "home"
    hp_ext = str(Path(sys.executable).with_name("hp-ext"))
    with running([hp_ext, *setup.hp_ext_command()[1:]], scratch, {"HPX_HOME": str(home)}) as process:
        wait(process, scratch)
    report = json.loads((scratch / "stdout").read_text())
    (events,) = home.glob("local/*/*/main/events.jsonl")
    steps = kept_steps(read_events(events).all_events())
    return our_recovery(report, steps, setup.kill_step)


def measure_torchrun(setup: Setup, scratch: Path) -> Recovery:
    """The same training under torchrun, which starts all workers anew from the newest checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", *setup.torchrun_command(str(scratch))[1:]]
    return measure_restart(setup, scratch, command, {})


def measure_restart(setup: Setup, scratch: Path, command: list[str], env: dict[str, str]) -> Recovery:
    """torchrun's script under a command that restarts all ranks from the newest checkpoint."""
    with running(command, scratch, env) as process:
        kill_t = kill_when_due(setup, scratch / f"rank{setup.kill_rank}.attempt0.jsonl", process, scratch)
        wait(process, scratch)
    attempts = read_attempts(scratch)
    if sorted(attempts) != [0, 1]:
        raise SideError(f"{command[0]} made {len(attempts)} attempts, expected 2\n{last_words(scratch)}")
    return torchrun_recovery(attempts[0], attempts[1], kill_t, setup.kill_step)


def read_attempts(scratch: Path) -> dict[int, dict[int, list[Stamp]]]:
    """What `rank<R>.attempt<A>.jsonl` hold, by attempt and rank."""
    attempts: dict[int, dict[int, list[Stamp]]] = {}
    for file in scratch.glob("rank*.attempt*.jsonl"):
        rank, attempt = map(int, re.findall(r"\d+", file.name))
        attempts.setdefault(attempt, {})[rank] = [json.loads(line) for line in file.read_text().splitlines()]
    return attempts


def kill_when_due(setup: Setup, stamps: Path, process: subprocess.Popen[bytes], scratch: Path) -> float:
    """SIGKILL the writer of `stamps` once it has reported that it makes the step; returns when."""
    deadline, position, pid = time.monotonic() + TIMEOUT_S, 0, 0
    while time.monotonic() < deadline and process.poll() is None:
        if stamps.exists():
            with stamps.open() as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    stamp = json.loads(line)
                    pid = stamp.get("pid", pid)
                    if stamp["event"] == "step_begin" and stamp["step"] == setup.kill_step:
                        os.kill(pid, signal.SIGKILL)
                        return time.monotonic()
        time.sleep(_POLL_S)
    raise SideError(f"rank {setup.kill_rank} did not come to step {setup.kill_step}\n{last_words(scratch)}")


@contextlib.contextmanager
def running(
    command: list[str], scratch: Path, env: dict[str, str], without: Collection[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block, nor does anything it started. `without`: not in its environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HPX_")}
    environ |= FAIR | env | {"TMPDIR": str(scratch)}
    environ = {name: value for name, value in environ.items() if name not in without}
    with (scratch / "stdout").open("ab") as stdout, (scratch / "stderr").open("ab") as stderr:
        process = subprocess.Popen(
            command, cwd=HERE.parents[1], env=environ, stdout=stdout, stderr=stderr, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_descendants(os.getpid())
            process.wait()


def wait(process: subprocess.Popen[bytes], scratch: Path) -> None:
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SideError(f"still running after {TIMEOUT_S:g} s\n{last_words(scratch)}") from None
    if code != 0:
        raise SideError(f"ended with exit code {code}\n{last_words(scratch)}")


def last_words(scratch: Path) -> str:
    return "\n".join((scratch / "stderr").read_text(errors="replace").splitlines()[-30:])
