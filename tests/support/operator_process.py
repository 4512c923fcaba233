"""A stand-in for AWS's operator that may be killed at any moment: a process that knows what is in two files.

`python operator_process.py FOLDER`: `pods.json` has the pods that are there, as the cluster's nodes report them, and
`job.json` what it has decided, written before anything is done, as an operator writes to the API server. It asks every
pod, and brings the job from what it finds to what is wanted: no call depends on one before. Standard library only, so
that it starts in milliseconds. It ends when the job has.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_POLL_S = 0.05
_TIMEOUT_S = 100.0
_GONE = "unreachable"


class Operator:
    """Runs one job on `nodes` pods; the others are spares.

    Args:
        folder: of its two files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job: dict[str, Any] = json.loads((folder / "job.json").read_text())

    def run(self) -> None:
        while self._job["phase"] != "over":
            {"begin": self._begin, "stop": self._stop, "start": self._start, "watch": self._watch, "end": self._end}[
                self._job["phase"]
            ]()
            time.sleep(_POLL_S)

    # --- one look, in each phase ----------------------------------------------------------------

    def _begin(self) -> None:
        """The first pods get the ranks."""
        ready = [pod for pod in self._pods() if self._status(pod)["status"] == "ready"]
        if len(ready) >= self._job["nodes"]:
            self._decide(active=ready[: self._job["nodes"]], phase="start")

    def _watch(self) -> None:
        """A job that trains."""
        said = {pod: self._status(pod) for pod in self._job["active"]}
        states = {one["status"] for one in said.values()}
        if states == {"completed"}:
            self._decide(phase="end")
        elif states - {"running", "completed"}:
            told = [one.get("message", one["status"]) for one in said.values()]
            asked = [one.get("restartMode") for one in said.values() if one["status"] == "faulted"]
            whole = "job_level_restart" in asked
            mode = "job_level_restart" if whole else "process_level_restart" if asked else "in_process_restart"
            faults = [*self._job["faults"], {"mode": mode, "told": told, "states": sorted(states)}]
            self._decide(phase="stop", faults=faults)

    def _stop(self) -> None:
        """All are to be ready, a spare in the place of each that is gone."""
        mode = self._job["faults"][-1]["mode"]
        active = list(self._job["active"])
        said = {pod: self._status(pod)["status"] for pod in self._pods()}
        for place, pod in enumerate(active):
            if said.get(pod, _GONE) == _GONE:
                spares = [other for other, state in said.items() if other not in active and state == "ready"]
                if spares:
                    active[place] = spares[0]
            elif said[pod] in ("running", "faulted", "completed"):
                self._ask(pod, "/stop", {"restart_mode": mode})
        if active != self._job["active"]:
            self._decide(active=active)
        elif all(self._status(pod)["status"] == "ready" for pod in active):
            self._decide(phase="start", version=self._job["version"] + 1)

    def _start(self) -> None:
        """All are told who they are, and to train."""
        spares = [pod for pod in self._pods() if pod not in self._job["active"]]
        for path, more in (("/update", {}), ("/start", {"progress": {}})):
            for rank, pod in enumerate(self._job["active"]):
                self._ask(pod, path, self._ranks(rank) | more)
        for place, pod in enumerate(spares):
            if self._status(pod).get("assigned_rank") is None:
                self._ask(pod, "/update", self._ranks(self._job["nodes"] + place) | {"spare": True})
        self._decide(phase="watch")

    def _end(self) -> None:
        """The job has succeeded: its pods are deleted."""
        for pod in self._pods():
            self._ask(pod, "/shutdown", {})
        if all(self._status(pod)["status"] == _GONE for pod in self._pods()):
            self._decide(phase="over")

    # --- what it knows --------------------------------------------------------------------------

    def _decide(self, **changes: Any) -> None:
        self._job |= changes
        draft = self._folder / "job.draft"
        draft.write_text(json.dumps(self._job))
        draft.replace(self._folder / "job.json")

    def _pods(self) -> list[str]:
        """Addresses of those that are there, the oldest first."""
        return json.loads((self._folder / "pods.json").read_text())

    def _ranks(self, rank: int) -> dict[str, Any]:
        active = self._job["active"]
        return {
            "rank": rank,
            "nnodes": self._job["nodes"],
            "faultCount": len(self._job["faults"]),
            "master_addr": active[0],
            "master_port": str(self._job["port"] + 100 + self._job["version"] % 50),
            "ipVersion": f"v{self._job['version']}",
            "rankIps": [{"rank": place, "ip": pod} for place, pod in enumerate(active)],
            "spare": False,
            "log_monitoring_configuration": self._job.get("log_rules") or None,
        }

    # --- calls ----------------------------------------------------------------------------------

    def _ask(self, pod: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a pod answers; one that cannot be reached is found by the next look."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{pod}:{self._job['port']}{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError), (self._folder / "refused.jsonl").open("a") as file:
                why = error.read().decode(errors="replace")
                file.write(json.dumps({"pod": pod, "path": path, "code": error.code, "why": why, "body": body}) + "\n")
            return {"status": "refused"}
        except (OSError, http.client.HTTPException):  # it may be killed while it answers
            return {"status": _GONE}

    def _status(self, pod: str) -> dict[str, Any]:
        return self._ask(pod, "/status")


if __name__ == "__main__":
    os.environ.clear()  # no proxy of this machine
    Operator(Path(sys.argv[1])).run()
