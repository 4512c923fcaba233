"""A stand-in for AWS's HyperPod operator: drives real `hyperpodrun` agents through faults, over the HTTP they serve.

Pods are processes of this machine, each at a loopback address of its own (127.0.1.N). The operator polls, as the real
one does: `/status` of every agent; `/update` with ranks and addresses; `/start` when all are ready; after a fault
`/stop`, a spare in the place of a pod that is lost, and `/start` with a higher fault count.

Not called `operator.py`: scripts beside it would find it in the place of Python's own module.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from waiting import PATIENCE_S

from hyperpod_ext.processes import descendants, is_alive

_POLL_S = 0.05
_TIMEOUT_S = PATIENCE_S
"""How long agents may take to be ready."""
_POD = "HPX_TEST_POD"


@dataclass
class Pod:
    """One node: an agent and whatever it starts."""

    number: int
    folder: Path
    command: Sequence[str]
    """The agent's, without its address."""
    port: int
    env: dict[str, str]
    agent: subprocess.Popen[bytes] | warm.Forked | None = None

    @property
    def ip(self) -> str:
        return f"127.0.1.{self.number + 1}"

    def start(self) -> None:
        (self.folder / "sockets").mkdir(parents=True, mode=0o700)
        own = {_POD: str(self.folder), "HPX_SOCKET_DIR": str(self.folder / "sockets"), "TMPDIR": str(self.folder)}
        command = self.command_line()
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(command, env={**os.environ, **self.env, **own}, stdout=log, stderr=log)

    def command_line(self) -> list[str]:
        """The agent's, at this pod's address."""
        program, *rest = self.command
        command = [program, "--server-host", self.ip, "--server-port", str(self.port), "--log_dir", str(self.folder)]
        return [*command, "--rdzv-conf", f"resource_config_dir={self.folder}", *rest]

    def processes(self) -> list[int]:
        """Everything that runs in this pod, whoever its parent is by now."""
        mark, found = f"{_POD}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """The node is lost: all of its processes at once, its memory with them."""
        while found := self.processes():
            # who would tell of the others' end is the first
            for pid in sorted(found, key=lambda pid: self.agent is None or pid != self.agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.agent is not None:
                self.agent.wait()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        request = urllib.request.Request(f"http://{host}:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"{}")

    def status(self) -> dict[str, Any]:
        try:
            return self.ask("/status")
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException):  # it may be killed while it answers
            return {"status": "unreachable"}


@dataclass
class OurPod(Pod):
    """A pod that our agent runs in: forked from the process of this test run that has everything imported."""

    host: str = ""
    """Its address, if it has one of its own."""
    seen: set[int] = field(default_factory=set)
    """Its processes, as far as somebody looked."""

    @property
    def ip(self) -> str:
        return self.host or super().ip

    def start(self) -> None:
        (self.folder / "sockets").mkdir(parents=True, mode=0o700)
        own = {"HPX_SOCKET_DIR": str(self.folder / "sockets"), "TMPDIR": str(self.folder)}
        at = ["--server-host", self.ip, "--server-port", str(self.port), *self.command]
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = warm.start(warm.OPERATOR_API, at, env={**os.environ, **self.env, **own}, log=log)

    def processes(self) -> list[int]:
        if self.agent is not None:
            self.seen |= {self.agent.pid, *descendants(self.agent.pid)}
        return [pid for pid in self.seen if is_alive(pid)]


@dataclass
class Operator:
    """Runs one job on `nodes` of the pods; the others are spares.

    `each_poll` is called between polls, with what the agents last said: tests break things there.
    """

    pods: list[Pod]
    nodes: int
    each_poll: Callable[[Operator, dict[int, dict[str, Any]]], None] = lambda operator, status: None
    faults: list[dict[str, Any]] = field(default_factory=list)
    """What the agents reported at each fault, and how they were told to restart."""
    max_faults: int = 3
    log_rules: list[dict[str, Any]] = field(default_factory=list)
    poll_s: float = _POLL_S
    resizes: list[dict[str, Any]] = field(default_factory=list)
    """Each change of the number of nodes: from, to, and how long agents took until they were ready again."""
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each active agent said last."""

    def run(self) -> None:
        """Until every rank has finished.

        Raises:
            AssertionError: the agents do not do what the real operator would wait for.
        """
        for pod in self.pods:
            pod.start()
        self.active, self.spares = self.pods[: self.nodes], self.pods[self.nodes :]
        self.wait_for(self.pods, "ready")
        for place, pod in enumerate(self.spares):
            pod.ask("/update", self.info_of(self.nodes + place) | {"spare": True})
        self.start_pods()
        while True:
            self.last = status = {pod.number: pod.status() for pod in self.active}
            said = [one["status"] for one in status.values()]
            if all(one == "completed" for one in said):
                return
            if {"faulted", "unreachable"} & set(said):
                self._recover(status)
            self.each_poll(self, status)
            time.sleep(self.poll_s)

    def _recover(self, status: dict[int, dict[str, Any]]) -> None:
        assert len(self.faults) < self.max_faults, f"one fault too many: {status}"
        asked = {one.get("restartMode") for one in status.values()}
        assert "job_level_restart" not in asked, f"the job cannot go on: {status}"
        mode = "process_level_restart" if "process_level_restart" in asked else "in_process_restart"
        self.faults.append({"mode": mode, "status": status, "t": time.monotonic()})
        for place, pod in enumerate(self.active):
            if status[pod.number]["status"] == "unreachable":
                assert self.spares, f"pod {pod.number} is lost and there is no spare"
                self.active[place] = self.spares.pop(0)
        for pod in self.active:
            if pod.number in status:
                pod.ask("/stop", {"restart_mode": mode})
        self.wait_for(self.active, "ready")
        self.start_pods()

    def resize(self, nodes: int, grace_s: int = 30) -> None:
        """Another number of nodes, as the elastic policy has it: a graceful stop of all, and a start. Pods that leave
        are deleted, and their memory with them."""
        began = time.monotonic()
        for pod in self.active:
            body = {"restart_mode": "process_level_restart", "is_graceful": True, "timeout": grace_s}
            pod.ask("/stop", body)
        self.wait_for(self.active, "ready")
        self.resizes.append({"of": self.nodes, "nodes": nodes, "stop_s": time.monotonic() - began})
        for pod in self.active[nodes:]:
            pod.kill()
        joining = [self.spares.pop(0) for _ in range(nodes - len(self.active))]
        self.nodes, self.active = nodes, [*self.active[:nodes], *joining]
        self.wait_for(self.active, "ready")
        self.start_pods()

    def start_pods(self) -> None:
        for rank, pod in enumerate(self.active):
            info, deadline = self.info_of(rank), time.monotonic() + _TIMEOUT_S
            while (said := pod.ask("/update", info)).get("assigned_rank", str(rank)) != str(rank):
                assert time.monotonic() < deadline, said
                time.sleep(_POLL_S)
        for rank, pod in enumerate(self.active):
            pod.ask("/start", self.info_of(rank) | {"progress": {}})

    def info_of(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "nnodes": self.nodes,
            "faultCount": len(self.faults),
            "master_addr": self.active[0].ip,
            "master_port": str(self.active[0].port + 1 + len(self.faults) + len(self.resizes)),
            "ipVersion": f"v{len(self.faults) + len(self.resizes)}",
            "rankIps": [{"rank": place, "ip": pod.ip} for place, pod in enumerate(self.active)],
            "spare": False,
            "log_monitoring_configuration": self.log_rules or None,
        }

    def wait_for(self, pods: Sequence[Pod], wanted: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while any((status := pod.status())["status"] != wanted for pod in pods):
            assert time.monotonic() < deadline, f"agents are not {wanted}: {status}"
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Nothing of any pod is left; what their agents have said last is printed."""
        for pod in self.pods:
            pod.kill()
            print(f"--- pod {pod.number}\n{(pod.folder / 'agent.log').read_text()[-6000:]}")
