"""Jobs that another launcher than our agent starts: the tiny script, and what its ranks wrote down of it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from event_log import events_in
from made_events import events_of

from hyperpod_ext.ports import free_port
from hyperpod_ext.runtime.events.report import committed_step, make_report

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TINY = Path(__file__).parents[1] / "faults" / "tiny.py"


@dataclass
class Launched:
    """One job of 4 ranks in `folder`."""

    folder: Path
    fault: dict[str, Any] = field(default_factory=dict)
    norm: str = "BatchNorm1d"
    durable: bool = False
    """Whether there is a shared directory for checkpoints, too."""
    every: dict[str, float] = field(default_factory=lambda: {"every_steps": 4})
    """How often it gets one."""
    steps: int = 12
    kind: str = "file"
    """Of the durable tier; `disk`: the node's own."""

    def env(self) -> dict[str, str]:
        """What every process of the job is told."""
        secret = self.folder / "secret"
        if not secret.exists():
            self.folder.mkdir(parents=True)
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(16))
        # at once, not beside the next step: a rank that dies while it copies loses that step
        tiers: list[dict[str, Any]] = [{"kind": "memory"}]
        if self.durable:
            tiers.append({"kind": self.kind, "path": str(self.folder / "durable"), **self.every})
        policy = {"overlap": False, "tiers": tiers}
        runtime = {"name": "tiny", "nodes": 2, "workers_per_node": 2, "checkpoint": policy}
        return {
            "HPX_RUNTIME": json.dumps(runtime),
            "HPX_RUN_DIR": str(self.folder),
            "HPX_SECRET_FILE": str(secret),
            "HPX_TEST_FAULT": json.dumps(self.fault),
            "HPX_TEST_NORM": self.norm,
            "HPX_TEST_STEPS": str(self.steps),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def elastic_env(self, nodes: int, *, peer: bool = False, **runtime: Any) -> dict[str, str]:
        """The same for `elastic_bitwise.py` with one rank a node, a tenth of a second a step."""
        told = self.env()
        config = json.loads(told["HPX_RUNTIME"]) | {"nodes": nodes, "workers_per_node": 1, "global_batch_size": 24}
        config["checkpoint"]["tiers"] = [{"kind": "memory"}, *([{"kind": "peer"}] if peer else [])]
        more = {"HPX_TEST_STEPS": str(self.steps), "HPX_TEST_SECONDS": "0.1"}
        return {**told, "HPX_RUNTIME": json.dumps(config | runtime), **more}

    def events(self) -> list[dict[str, Any]]:
        """Of all ranks, in the order of time."""
        files = self.folder.glob("events-rank*.jsonl")
        return sorted((event for file in files for event in events_in(file)), key=lambda event: event["t"])

    def report(self) -> dict[str, Any]:
        return make_report(events_of(self.events()), state="succeeded", error=None, world_size=4)

    def went_on_from(self) -> list[int]:
        """Step after which each generation went on."""
        return [event["step"] for event in self.events() if event["event"] == "go"]

    def committed(self, generation: int) -> int:
        """Newest step that all ranks made in a generation, or before."""
        made = (event for event in self.events() if event["generation"] <= generation)
        return committed_step(events_of(made), 4)

    def pids(self, rank: int) -> list[int]:
        """Processes that were this rank, one after another."""
        return [e["pid"] for e in self.events() if e["event"] == "joined" and e["rank"] == rank]

    def torchrun(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run it under torchrun, 4 ranks on one node, to its end."""
        env = self._torchrun_env()
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", *options, str(TINY)]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def torchruns(self, *options: str) -> list[int]:
        """Run it under two torchruns, 2 ranks each, to its end; returns their exit codes."""
        env, endpoint = self._torchrun_env(), f"127.0.0.1:{free_port()}"
        shape = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        hosts = [["--rdzv-conf", f"is_host={int(node == 0)}"] for node in range(2)]
        nodes = [subprocess.Popen([*TORCHRUN, *shape, *host, *options, str(TINY)], env=env) for host in hosts]
        return [node.wait() for node in nodes]

    def _torchrun_env(self) -> dict[str, str]:
        env = {**os.environ, **self.env()}
        sockets = self.folder / "sockets"
        sockets.mkdir(mode=0o700)
        return env | {"HPX_SOCKET_DIR": str(sockets)}


class LoggedByAgents(Launched):
    """One whose ranks our agents start, so that the coordinator writes one log of all."""

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.folder / "events.jsonl")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == kind]


def assert_equal(job: Launched, undisturbed: dict[str, Any]) -> None:
    """Bit for bit the run that nobody disturbed, whatever launcher that had."""
    report = job.report()
    for part in ("losses", "weights", "metrics"):
        assert report[part] == undisturbed[part], part


def weights(job: Launched) -> tuple[int, int]:
    """Digest of the weights that `elastic_bitwise.py` ends with."""
    found = [e for e in job.events() if e["event"] == "metric" and "weights_low" in e]
    assert found
    assert len({(e["weights_low"], e["weights_high"]) for e in found}) == 1, "all ranks have the same"
    return found[0]["weights_low"], found[0]["weights_high"]


def losses(job: Launched) -> dict[int, float]:
    """Of each step, the same on all ranks."""
    steps = [event for event in job.events() if event["event"] == "step"]
    found = {event["step"]: event["loss"] for event in steps}
    assert all(found[event["step"]] == event["loss"] for event in steps), "ranks differ"
    return found
