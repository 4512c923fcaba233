"""Jobs of real agents and workers, on as many 'nodes' of this machine as a test asks for."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import warm
import whole_run
from event_log import event_in, events_in

from hyperpod_ext.config.job.runtime import ENV_RUNTIME
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import descendants

TINY = Path(__file__).parent / "tiny.py"
SHARDED = Path(__file__).parent / "sharded.py"
SHARDED_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]


@dataclass
class Job:
    """A job of `nodes` agents started directly, without the launcher."""

    folder: Path
    nodes: int = 2
    workers_per_node: int = 2
    spares: int = 0
    script: Path = TINY
    args: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    host: str = "127.0.0.1"
    namespaces: list[str] = field(default_factory=list)
    """Network namespace of each node, where they do not share one."""
    elsewhere: dict[int, list[str]] = field(default_factory=dict)
    """What each node's agent is started with, where that makes another machine of it."""
    env_of: dict[int, dict[str, str]] = field(default_factory=dict)
    """Variables of one node alone."""
    cold: bool = False
    """Whether each process is started as on a machine that runs nothing yet, and does its own imports."""
    agents: list[Any] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)

    def start(self, later: Collection[int] = ()) -> Job:
        """Start all nodes but those that come later."""
        self.folder.mkdir(parents=True)
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        # at once, not beside the next step: a rank that dies while it copies loses that step
        policy = {"overlap": False, **self.settings.get("checkpoint", {})}
        runtime = {"name": "tiny", "nodes": self.nodes, "workers_per_node": self.workers_per_node}
        runtime |= {"spares": self.spares}
        runtime |= {**self.settings, "checkpoint": policy}
        environ = {
            **os.environ,
            ENV_RUNTIME: json.dumps(runtime),
            "HPX_RUN_DIR": str(self.folder),
            "HPX_SECRET_FILE": str(secret),
            **self.env,
        }
        # slow in that step: a busy machine may let the agent strike late, and the last step would be over
        each = self.workers_per_node
        struck = [(kill.get("rank", kill.get("node", 0) * each), kill["step"]) for kill in self._kills_by_agents()]
        kills = [f"slow:rank={rank},step={step},seconds=0.5" for rank, step in struck]
        if kills:
            environ["HPX_CHAOS"] = ";".join([*kills, *filter(None, [environ.get("HPX_CHAOS")])])
        self.port = self.port or free_port()
        self.environ = environ
        for node in range(self.nodes + self.spares):
            if node not in later:
                self.agents.append(self.start_agent(node))
        return self

    def _kills_by_agents(self) -> list[dict[str, Any]]:
        return (self.settings.get("chaos") or {}).get("faults", [])

    def start_agent(self, node: int, *flags: str) -> Any:
        """One node's agent, as a `subprocess.Popen` or what is used like one."""
        arguments = ["--nnodes", str(self.nodes), *flags, "--nproc-per-node", str(self.workers_per_node)]
        arguments += ["--node-rank", str(node), "--rdzv-endpoint", f"{self.host}:{self.port}"]
        arguments += ["--", str(self.script), *self.args]
        inside = ["ip", "netns", "exec", self.namespaces[node]] if self.namespaces else []
        inside += self.elsewhere.get(node, [])
        env = self.environ | self.env_of.get(node, {})
        with (self.folder / f"node{node}.log").open("ab") as log:
            if not self.cold and not inside:
                return warm.start(warm.AGENT, arguments, env=env, log=log)
            command = [*inside, sys.executable, "-m", "hyperpod_ext.runtime.agent", *arguments]
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def wait(self) -> dict[str, Any]:
        """The report, once every agent has ended."""
        for agent in self.agents:
            agent.wait()
        return json.loads((self.folder / "report.json").read_text())

    def codes(self) -> list[int]:
        return [agent.wait() for agent in self.agents]

    def events(self) -> Iterator[dict[str, Any]]:
        """Events as they come, until the job ends."""
        path = self.folder / "events.jsonl"
        position = 0
        while True:
            ended, before = all(agent.poll() is not None for agent in self.agents), position
            if path.exists():
                with path.open() as file:
                    file.seek(position)
                    while (line := file.readline()).endswith("\n"):
                        position = file.tell()
                        if (event := event_in(line)) is not None:
                            yield event
            if ended:
                return
            if position == before:
                time.sleep(0.01)  # the job needs the processors more than who looks at it

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Block until the log has such an event."""
        for entry in self.events():
            if entry["event"] == event and all(entry.get(key) == value for key, value in fields.items()):
                return entry
        raise AssertionError(f"the job ended without {event} {fields}:\n{self.logs()}")

    def processes(self) -> list[int]:
        """Everything that runs for this job now, agents included."""
        return [pid for agent in self.agents for pid in (agent.pid, *descendants(agent.pid))]

    def logs(self) -> str:
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("logs/*.log")])
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def stop(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            agent.wait()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for a job's sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes jobs; they are stopped, and what they said is shown, if the test fails."""
    made: list[Job] = []

    def make(name: str = "job", *, fault: dict[str, Any] | None = None, **options: Any) -> Job:
        env = dict(options.pop("env", {}))
        if fault is not None:
            env["HPX_TEST_FAULT"] = json.dumps(fault)
        made.append(Job(tmp_path / name, env=env, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        print(one.logs())
        print(f"exit codes of the agents: {one.codes()}")
        events_in(one.folder / "events.jsonl")  # each is as declared


@pytest.fixture(scope="session")
def job_class() -> type[Job]:
    """For fixtures that outlive a test."""
    return Job


def _report_of(folder: Path, **options: Any) -> dict[str, Any]:
    """Of a job with nothing going wrong."""
    report = Job(folder / "job", **options).start().wait()
    assert report["state"] == "succeeded", report["error"]
    return report


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Report of the tiny script with nothing going wrong: what every other run must equal bit for bit."""
    report: dict[str, Any] = whole_run.once("undisturbed", lambda: _report_of(tmp_path_factory.mktemp("undisturbed")))
    assert len(report["losses"]) == 12
    assert report["weights"]
    return report


@pytest.fixture(scope="session")
def alike(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `undisturbed`, where all state is the same on every rank, so that each node's is the others' copy."""
    env = {"HPX_TEST_NORM": "LayerNorm"}
    report: dict[str, Any] = whole_run.once("alike", lambda: _report_of(tmp_path_factory.mktemp("alike"), env=env))
    return report


@pytest.fixture(scope="session")
def wanted_on_pods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `alike`, with as many steps as jobs on `random_pods` have."""
    env = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_STEPS": "40"}
    folder = tmp_path_factory.mktemp("wanted")
    report: dict[str, Any] = whole_run.once("wanted on pods", lambda: _report_of(folder, env=env))
    return report


@pytest.fixture
def sharded(job: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes jobs of the sharded script; all of one test have the same name and secret."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the same at every start of a job")

    def make(
        name: str, *faults: dict[str, Any], tiers: Any = ({"kind": "memory"},), steps: int = 12, **more: Any
    ) -> Job:
        sockets = tmp_path_factory.mktemp("s")
        env = {"HPX_SECRET_FILE": str(secret), "HPX_SOCKET_DIR": str(sockets), "HPX_TEST_STEPS": str(steps)}
        env |= {"HPX_TEST_FAULTS": json.dumps(faults), **more.pop("env", {})}
        policy = {"tiers": list(tiers), "grace_s": 90.0, **more.pop("policy", {})}
        settings = {"checkpoint": policy, "restart": {"preload": SHARDED_PRELOAD}}
        return job(name, script=SHARDED, settings=settings, env=env, **more)

    return make


@pytest.fixture(scope="session")
def undisturbed_sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Report of the sharded script with nothing going wrong."""
    options = {"script": SHARDED, "settings": {"restart": {"preload": SHARDED_PRELOAD}}}
    make = functools.partial(_report_of, tmp_path_factory.mktemp("undisturbed_sharded"), **options)
    report: dict[str, Any] = whole_run.once("undisturbed_sharded", make)
    assert len(report["losses"]) == 12
    return report


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Any]:
    """A function that makes small jobs over real memory servers, without training processes."""
    from small_job import SmallJob

    made: list[SmallJob] = []

    def make(*tiers: dict[str, Any], **options: Any) -> SmallJob:
        made.append(SmallJob(tmp_path / f"job{len(made)}", tiers=tiers, **options))
        return made[-1].start()

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A durable tier: a directory, or with the parameter "s3" a bucket."""
    from durable_place import Bucket, Directory
    from s3_server import CREDENTIALS

    if getattr(request, "param", "file") == "file":
        return Directory(tmp_path / "checkpoints")
    bucket = Bucket()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": bucket.url}.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Between a job and S3."""
    from durable_place import Bucket
    from fault_proxy import FaultProxy
    from s3_server import CREDENTIALS

    with FaultProxy(Bucket().url) as proxy:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy
