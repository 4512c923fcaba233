"""A job on pods that an operator drives, and kills of ranks, agents, pods and the operator: all of it from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launched
import operator_process
import warm
from event_log import GrowingLog
from hyperpodrun_env import hyperpodrun
from waiting import PATIENCE_S, until

from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import MONITOR_S
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import descendants, is_alive
from hyperpod_ext.scratch import remove_abandoned

ELASTIC = launched.TINY.with_name("elastic_bitwise.py")
STEPS, ELASTIC_STEPS, CONTINUED_STEPS = 40, 400, 100
STEP_S = 0.05
NODES, EACH = 2, 2
_LOOK_S = 0.02
_SEE_S = 0.25
"""How often all processes of the pods are looked at: much more costly."""
_OURS = ("hpx", "prefork", "pymp")
"""What folders and sockets of ours begin with. torch makes a folder for its cache on import."""
_BUDGET = 50
RESTART = {
    "max_restarts": _BUDGET,
    "max_on_node": _BUDGET,
    "max_in_process": _BUDGET,
    "max_node_losses": _BUDGET,
    "quarantine_after": _BUDGET,
    "node_wait_s": PATIENCE_S,
}


@dataclass(frozen=True)
class Kill:
    """One fault."""

    what: str
    """`rank`; `agent`: the first process of a pod, alone; `pod`: all of its processes; `operator`."""
    which: int
    """Rank, or node."""
    step: int
    """It strikes once some rank has made this step."""
    delay_s: float
    """And so long after that, or after the kill before."""
    beside: bool
    """It does not wait for its step: the job may be mending what was before."""
    comes_back: bool
    """The pod's container starts again in its place; else another pod comes. Of an operator, whether at once."""


def plan(seed: int) -> list[Kill]:
    """What happens to the job of this seed."""
    chance = random.Random(f"pods {seed}")
    steps = sorted(chance.randrange(1, STEPS - 2) for _ in range(chance.randint(2, 4)))
    kinds = [chance.choices(("rank", "agent", "pod", "operator"), (30, 25, 15, 30))[0] for _ in steps]
    return [
        Kill(
            what,
            chance.randrange(NODES * EACH if what == "rank" else NODES),
            step,
            round(chance.random() * (1.5 if (beside := place > 0 and chance.random() < 0.4) else 0.1), 3),
            beside,
            chance.random() < 0.5,
        )
        for place, (what, step) in enumerate(zip(kinds, steps, strict=True))
    ]


@dataclass
class Pod:
    """One that the operator may use, at an address of its own."""

    number: int
    folder: Path
    runs: Any = None
    """Its first process."""
    comes_back: bool = False
    seen: set[int] = field(default_factory=set)
    """Its processes, as far as they were seen."""

    @property
    def ip(self) -> str:
        return f"127.0.1.{self.number + 1}"

    def look(self) -> None:
        self.seen |= {self.runs.pid, *descendants(self.runs.pid)}


@dataclass
class Pods:
    """The job, its pods and its operator.

    Args:
        folder: an empty one with a short path, for sockets.
        launcher: what runs in the pods: `ours`; `hyperpodrun`, as `hp-ext` renders it; or `hyperpodrun alone`, as AWS
            has it, with nothing of ours between it and the script.
    """

    folder: Path
    launcher: str = "ours"
    fault: dict[str, Any] = field(default_factory=dict)
    """What the script does to itself, as HPX_TEST_FAULT has it."""
    log_rules: list[dict[str, Any]] = field(default_factory=list)
    """What the operator has pods look for in their output."""
    hang: dict[str, float] = field(default_factory=dict)
    """When our agent takes a rank for hanging."""
    replenished: bool = True
    """Whether another pod comes for each that is lost; else only for one that is missing, after the spares."""
    quiet: bool = False
    """Print nothing at the end."""
    program: str = operator_process.__file__
    """The operator's."""
    inject: str = ""
    """Faults that ranks inflict on themselves, as HPX_CHAOS has them."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Numbers of nodes that the job is to have, by the step after which; such a job has one rank on each."""
    continues: bool = False
    """Whether steps have the same bits on any number of ranks, and our agents go on without lost ones."""
    patience_s: float = 3 * PATIENCE_S
    """AWS's agent imports for long on a busy machine."""
    pods: list[Pod] = field(default_factory=list)
    gone: list[Pod] = field(default_factory=list)
    operator: subprocess.Popen[bytes] | None = None
    operator_at: float = 0.0
    """When one is started, if there is none."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of each step that was seen. One that is made twice has the same both times."""
    told: list[str] = field(default_factory=list)
    """What was done."""
    asked_for: int = 0
    """Nodes that the operator was asked for last; 0: none."""
    _logs: dict[Path, GrowingLog] = field(default_factory=dict)
    _seen_at: float = 0.0

    def __post_init__(self) -> None:
        self.job = launched.Launched(self.folder / "job", self.fault, "LayerNorm", durable=True, steps=STEPS)
        self.job.folder.parent.mkdir(exist_ok=True)
        self.port = free_port()
        env = self.job.env()
        runtime = json.loads(env["HPX_RUNTIME"]) | {"restart": RESTART | {"hang": self.hang}}
        runtime["checkpoint"]["tiers"].append({"kind": "peer"})
        self.env = {**env, "HPX_RUNTIME": json.dumps(runtime), "HPX_TEST_SECONDS": str(STEP_S), "HPX_TEST_SAYS": "1"}
        self.env |= {"HPX_CHAOS": self.inject} if self.inject else {}
        self.each, self.script = (1, ELASTIC) if self.sizes else (EACH, launched.TINY)
        if self.sizes:
            self.job.steps = ELASTIC_STEPS
            bounds = {"elastic": {"min_nodes": 1, "max_nodes": max(self.sizes.values())}}
            self.env = self.job.elastic_env(NODES, restart=RESTART, **(bounds if self.launcher == "ours" else {}))
        if self.continues:
            self.script, self.job.steps = ELASTIC, CONTINUED_STEPS
            policy = {"policy": "continue"} if self.launcher == "ours" else {}
            self.env = self.job.elastic_env(NODES, workers_per_node=EACH, restart=RESTART | policy)
            self.env |= {"HPX_TEST_SECONDS": str(STEP_S)}
        first = {"nodes": NODES, "port": self.port, "phase": "begin", "version": 0, "faults": []}
        self._write("job.json", first | {"log_rules": self.log_rules})

    def run(self, kills: list[Kill], spares: int) -> None:
        """To its end."""
        for _ in range(NODES + spares):
            self._add_pod()
        left, last = list(kills), time.monotonic()
        due: float | None = None
        deadline = time.monotonic() + self.patience_s
        while self.phase != "over":
            now = time.monotonic()
            assert now < deadline, "the job does not come to its end"
            self._look(now)
            newest = self.newest_step()
            self._resize(newest)
            if left and due is None and (left[0].beside or newest >= left[0].step):
                due = (last if left[0].beside else now) + left[0].delay_s
            if left and due is not None and now >= due and self.phase not in ("end", "over"):
                kill = left.pop(0)
                self._strike(kill)
                last, due, deadline = now, None, now + self.patience_s
            time.sleep(_LOOK_S)
        self.newest_step()
        for pod in self.pods:  # which the job's end deletes, also those that did not listen yet
            if self.launcher != "ours":
                pod.runs.kill()
            elif "/shutdown" not in self._log(pod).read_text():
                pod.runs.terminate()

    def _resize(self, newest: int) -> None:
        """Have the operator take another number of nodes, once the last one is what the job has."""
        if self.script != ELASTIC or self.continues or (self.asked_for and self.decided["nodes"] != self.asked_for):
            return
        worlds = [event["world"] for event in self.events() if event["event"] == "step"]
        if not worlds or worlds[-1] != self.decided["nodes"]:
            return
        if not self.sizes:
            (self.job.folder / "hurry").touch()
        elif newest >= (after := min(self.sizes)):
            self.asked_for = self.sizes.pop(after)
            self._write("wants.json", self.asked_for)

    @property
    def phase(self) -> str:
        return str(self.decided["phase"])

    @property
    def decided(self) -> dict[str, Any]:
        return json.loads((self.folder / "job.json").read_text())

    def events(self) -> list[dict[str, Any]]:
        """Of the coordinator, or of all ranks in the order of time where they write them."""
        if found := self._log_of(self.job.folder / "events.jsonl").events():
            return found
        files = self.job.folder.glob("events-rank*.jsonl")
        return sorted((event for file in files for event in self._log_of(file).events()), key=lambda event: event["t"])

    def _log_of(self, file: Path) -> GrowingLog:
        return self._logs.setdefault(file, GrowingLog(file))

    def newest_step(self) -> int:
        steps = [event for event in self.events() if event["event"] == "step"]
        for event in steps:
            assert self.losses.setdefault(event["step"], event["loss"]) == event["loss"], event
        return max((event["step"] for event in steps), default=0)

    def assert_equal(self, wanted: dict[str, Any]) -> None:
        """Bit for bit the run that nobody disturbed."""
        began = min(event["step"] for event in self.events() if event["event"] == "go")
        unseen = range(1, began + 1)  # of an earlier run of the job, whose log the last one has replaced
        known = {int(step): loss for step, loss in wanted["losses"].items()}
        assert {step: known[step] for step in unseen} | self.losses == known
        found = self.report()
        for part in ("state", "weights", "metrics"):
            assert found[part] == wanted[part], part

    def report(self) -> dict[str, Any]:
        """The job's own, or of its ranks' events where they write them."""
        file = self.job.folder / "report.json"
        return json.loads(file.read_text()) if file.exists() else self.job.report()

    # --- what the cluster does --------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """A container that ended comes again, or another pod does; so does the operator, when it is time."""
        if now >= self._seen_at + _SEE_S:
            self._seen_at = now
            for pod in self.pods:
                pod.look()
        for pod in list(self.pods):
            if pod.runs.poll() is not None and self.phase not in ("end", "over"):
                self.told.append(f"pod {pod.number} ended with {pod.runs.poll()}")
                if pod.comes_back:
                    pod.comes_back = False
                    self._start(pod)
                else:
                    self.pods.remove(pod)
                    self.gone.append(pod)
                    if self.replenished or len(self.pods) < NODES:
                        self._add_pod()
        if self.operator is not None and self.operator.poll() not in (None, -signal.SIGKILL):
            assert self.operator.returncode == 0, "the operator has failed"
        if (self.operator is None or self.operator.poll() is not None) and now >= self.operator_at:
            with (self.folder / "operator.log").open("ab") as log:
                command = [sys.executable, "-S", self.program, str(self.folder)]
                self.operator = subprocess.Popen(command, stdout=log, stderr=log)

    def _add_pod(self) -> None:
        number = len(self.pods) + len(self.gone)
        pod = Pod(number, self.folder / f"p{number}")
        (pod.folder / "tmp").mkdir(parents=True, mode=0o700)
        self.pods.append(pod)
        self._start(pod)
        self._write("pods.json", [one.ip for one in self.pods])

    def _start(self, pod: Pod) -> None:
        at = ["--server-host", pod.ip, "--server-port", str(self.port)]
        at += ["--nnodes", str(NODES), "--nproc-per-node", str(self.each)]
        environ = {**os.environ, **self.env, "TMPDIR": str(pod.folder / "tmp")}
        with self._log(pod).open("ab") as log:
            if self.launcher == "ours":
                at += ["--rdzv-port", str(self.port + 1), "--", str(self.script)]
                pod.runs = warm.start(warm.OPERATOR_API, at, env=environ, log=log)
            else:
                (pod.folder / "logs").mkdir(exist_ok=True)
                at += [] if self.script == ELASTIC and not self.continues else ["--inprocess-restart"]
                at += ["--log_dir", str(pod.folder / "logs"), "--tee", "3", "--redirect", "3"]
                at += ["--rdzv-conf", f"resource_config_dir={pod.folder / 'logs'}", "--server-log-level", "warning"]
                if self.launcher == "hyperpodrun":
                    at += ["--monitor-interval", MONITOR_S, "-m", "hyperpod_ext.runtime.prefork"]
                command = [str(hyperpodrun()), *at, str(self.script)]
                environ |= {"NNODES": str(NODES), "HPX_PORT_BASE": str(self.port + 10)}
                pod.runs = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def _log(self, pod: Pod) -> Path:
        return self.folder / f"pod{pod.number}.log"

    def _strike(self, kill: Kill) -> None:
        self.told.append(f"{kill}, at step {self.newest_step()}, {self.phase}")
        match kill.what:
            case "operator":
                if self.operator is not None:
                    self.operator.kill()
                    self.operator.wait()
                self.operator_at = time.monotonic() + (0 if kill.comes_back else 2 * kill.delay_s)
            case "rank":
                pids = [e["pid"] for e in self.events() if e["event"] == "joined" and e["rank"] == kill.which]
                if pids and is_alive(pids[-1]):
                    os.kill(pids[-1], signal.SIGKILL)
            case _:
                self._strike_pod(kill)

    def _strike_pod(self, kill: Kill) -> None:
        active = self.decided.get("active", [])
        for pod in [pod for pod in self.pods if active and pod.ip == active[kill.which]]:
            pod.comes_back = kill.comes_back
            pod.look()
            pod.runs.kill()
            if kill.what == "pod":
                for pid in pod.seen:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            pod.runs.wait(PATIENCE_S)

    def _write(self, name: str, what: Any) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_text(json.dumps(what))
        draft.replace(self.folder / name)

    # --- afterwards -------------------------------------------------------------------------------

    def assert_nothing_left(self) -> None:
        """No process, and no folder but those of pods that were killed, which the next agent there removes."""
        for pod in (*self.pods, *self.gone):
            until(lambda pod=pod: not [pid for pid in pod.seen if is_alive(pid)], f"of pod {pod.number} something runs")
            if pod.runs.poll() != 0:
                remove_abandoned(within=pod.folder / "tmp")
            left = [path.name for path in (pod.folder / "tmp").iterdir() if path.name.startswith(_OURS)]
            assert not left, f"pod {pod.number} has left {left}"

    def end(self) -> None:
        """Whatever happened: everything is ended, and what it said is printed."""
        for pod in self.pods:
            if pod.runs.poll() is None:
                pod.look()
        if self.operator is not None:
            self.operator.kill()
            self.operator.wait()
        if not self.quiet:
            self._tell_all()
        for pod in (*self.pods, *self.gone):
            for pid in pod.seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for log in self._logs.values():
            log.close()

    def _tell_all(self) -> None:
        print("\n".join(self.told), "\n", self.decided)
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-5000:]}")
        if (refused := self.folder / "refused.jsonl").exists():
            print(f"--- refused\n{refused.read_text()[-3000:]}")
        print("--- events", *[event for event in self.events() if event["event"] != "step"][-40:], sep="\n")
        for pod in self.pods:
            with contextlib.suppress(OSError, ValueError):
                print(urllib.request.urlopen(f"http://{pod.ip}:{self.port}/status", timeout=5).read().decode())


@contextlib.contextmanager
def pods(launcher: str = "ours", **options: Any) -> Iterator[Pods]:
    """A job that is ready to be run."""
    folder = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    made = Pods(folder, launcher, **options)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(folder)
