"""Jobs of the command line on the cluster of `slurm_cluster`: folders, and what is to be seen in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import HP_EXT, Done
from slurm_cluster import SlurmCluster

TARGET = ("--target", "hyperpod-slurm")
URL = "hyperpod-slurm://test/tiny-gpt"
SMALL = ("--width", "16", "--layers", "1")


@dataclass
class Place:
    """A folder with a job in it, and the command line in front of the cluster."""

    cluster: SlurmCluster
    folder: Path
    home: str = "home"
    """What this machine remembers."""

    def write_job(self, steps: int = 20, **more: Any) -> None:
        spec = {
            "name": "tiny-gpt",
            "script": "train.py",
            "args": ["--steps", str(steps), *SMALL],
            "nodes": 2,
            "global_batch_size": 16,
            "checkpoint": {
                "tiers": [{"kind": "memory"}, {"kind": "file", "path": str(self.folder / "kept"), "every_steps": 2}]
            },
            "slurm": {"python": sys.executable},
        }
        (self.folder / "job.yaml").write_text(json.dumps(spec | more))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        env = os.environ | {"SLURM_CONF": str(self.cluster.conf), "HPX_HOME": str(self.folder / self.home)}
        command = [HP_EXT, *arguments]
        return subprocess.Popen(
            command, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hp_ext(self, *arguments: str) -> Done:
        return done(self.start(*arguments))

    def create(self, *more: str) -> Done:
        return self.hp_ext("create-job", "-f", "job.yaml", *TARGET, "-o", "json", *more)

    def start_dir(self, job: str, name: str = "0.0") -> Path:
        return self.folder / "hpx-runs" / "tiny-gpt" / job / name


def done(process: subprocess.Popen[str], seconds: float = 100) -> Done:
    stdout, stderr = process.communicate(timeout=seconds)
    assert "Traceback" not in stderr, stderr
    _, *words = process.args
    return Done(process.returncode, stdout, stderr, tuple(map(str, words)))


def made_step(events: Path, step: int) -> bool:
    lines = events.read_text().splitlines() if events.exists() else []
    return any(
        event.get("event") == "step" and event["step"] >= step
        for event in map(json.loads, lines[:-1])  # the last may not be whole
    )


def agents_in(folder: Path) -> dict[str, int]:
    """Process of each node's agent, by the node's number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "hyperpod_ext.runtime.agent" in words and str(folder) in str((entry / "cwd").readlink()):
                    found[words[words.index("--node-rank") + 1]] = int(entry.name)
    return found


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def durable_step(folder: Path) -> int:
    """The newest step that a job can go on from; the first is 0."""
    return max((int(file.parent.name.split("-")[1]) for file in folder.glob("step-*/manifest.json")), default=-1)
