"""Jobs that are resized: a stand-in for whoever starts nodes, orders, and what must hold whatever happens."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from event_log import events_in

ELASTIC = Path(__file__).parents[1] / "faults" / "elastic.py"
BITWISE = ELASTIC.with_name("elastic_bitwise.py")
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
FROM_MEMORY = {"self", "live", "memory", "peer"}


class Resizable:
    """A job whose nodes are started when it wants them."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self._orders = 0
        self._stopped = threading.Event()
        self._starter = threading.Thread(target=self._start_nodes, daemon=True)

    def start(self) -> Resizable:
        self.job.start()
        self._starter.start()
        return self

    def order(self, nodes: int) -> str:
        """As `hp-ext resize` does."""
        folder = self.job.folder / "resizes"
        folder.mkdir(exist_ok=True)
        self._orders += 1
        name = f"{self._orders:03d}"
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps({"nodes": nodes}))
        partial.rename(folder / f"{name}.json")
        return name

    def resize(self, nodes: int) -> dict[str, Any]:
        """Order it, and wait until the job trains on so many."""
        return self.job.until("resized", order=self.order(nodes))

    def finish(self) -> dict[str, Any]:
        """The report, once the rest of the steps has been made as fast as can be."""
        (self.job.folder / "hurry").touch()
        self.job.until("job_ended")
        report: dict[str, Any] = self.job.wait()
        self.close()
        return report

    def close(self) -> None:
        self._stopped.set()
        if self._starter.is_alive():
            self._starter.join()

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.job.folder / "events.jsonl")

    def _start_nodes(self) -> None:
        seen, file, agents = None, self.job.folder / "nodes_wanted.json", self.job.agents
        while not self._stopped.wait(0.05):
            # the number of a file that was replaced twice may be that of the first again
            if not file.exists() or (said := ((status := file.stat()).st_ino, status.st_mtime_ns)) == seen:
                continue
            seen = said
            for node in json.loads(file.read_text())["nodes"]:
                while len(agents) > node and agents[node].poll() is None and not self._is_member(node):
                    time.sleep(0.01)  # it is about to end
                if len(agents) <= node or agents[node].poll() is not None:
                    agent = self.job.start_agent(node, "--rejoin")
                    agents[node : node + 1] = [agent]

    def _is_member(self, node: int) -> bool:
        kinds = [
            e["event"]
            for e in self.events()
            if e.get("node") == node and e["event"] in ("node_joined", "node_left", "node_lost")
        ]
        return kinds[-1:] == ["node_joined"]


def settings(**more: Any) -> dict[str, Any]:
    """Of a job of one to four nodes that writes to a durable tier, and has no need to read it."""
    elastic = {"min_nodes": 1, "max_nodes": 4, **more.pop("elastic", {})}
    return {"global_batch_size": 24, "elastic": elastic, "restart": {"preload": PRELOAD}, **more}


def assert_went_on(resized: Resizable, report: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """The job is whole, its losses are those of the undisturbed run, and nothing was read from storage."""
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"].keys() == undisturbed["losses"].keys()
    for step, loss in undisturbed["losses"].items():
        assert report["losses"][step] == pytest.approx(loss, rel=2e-3, abs=1e-4), f"step {step}"
    restored = [e for e in resized.events() if e["event"] == "restored" and e["generation"] > 1]
    assert restored
    assert {e["source"] for e in restored} <= FROM_MEMORY


def run_alone(job: Any) -> Any:
    """Run a job of the script BITWISE, of one rank that nobody disturbs, to its end."""
    report = job.start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["world_size"] == 1
    return job


def assert_bitwise(resized: Resizable, report: dict[str, Any], alone: Any) -> None:
    """As `assert_went_on`; and each loss and the weights are those of the job that ran alone, bit for bit."""
    expected = json.loads((alone.folder / "report.json").read_text())
    assert_went_on(resized, report, expected)
    differing = [step for step, loss in expected["losses"].items() if report["losses"][step] != loss]
    assert not differing, f"losses differ from step {differing[0]} on"
    assert bits_of(resized.job) == bits_of(alone)


def bits_of(job: Any) -> tuple[int, int]:
    """What ranks have told of their final weights."""
    events = events_in(job.folder / "events.jsonl")
    found = {(e["weights_low"], e["weights_high"]) for e in events if e["event"] == "metric" and "weights_low" in e}
    assert len(found) == 1, "all ranks have the same"
    return found.pop()
