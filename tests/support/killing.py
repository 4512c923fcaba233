"""Kills processes of a local job as a case says, and looks at what came of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from command import Done, call_hp_ext
from event_log import events_in
from kill_cases import Case, Victim
from local_place import LocalPlace
from local_victims import agent_of, engine_of, fork_server_of, keeper_of, memory_server_of, rank_of, run_of
from waiting import PATIENCE_S, until

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.processes import descendants, is_alive

SCRIPT = Path(__file__).parents[1] / "faults" / "phases.py"
SIGNALS = {
    "`kill -9`": signal.SIGKILL,
    "Ctrl-C": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "closed": signal.SIGHUP,
}
VICTIMS: dict[str, Callable[[LocalPlace, int], int]] = {
    "rank": rank_of,
    "agent": agent_of,
    "memory server": memory_server_of,
    "fork server": fork_server_of,
    "engine": lambda place, _: engine_of(place),
    "keeper": lambda place, _: keeper_of(place),
}
_OURS = ("hpx", "pymp")
"""How names of folders begin that we make, and of those that Python makes for us; torch has some of its own."""
_NOTICED = {"fault", "node_lost", "memory_lost", "fork_server_lost", "job_ended"}


@dataclass
class Outcome:
    """What came of a case."""

    code: int
    """Exit code of the command that waited, or of the next one where it was killed."""
    state: str
    words: dict[str, str]
    """The last word, by who says it."""
    disagreeing: list[str]
    """Who says something else than the report, and what."""
    result: dict[str, Any]
    events: list[dict[str, Any]]
    left: list[str]
    seconds: float


def spec(where: str) -> dict[str, Any]:
    """Two nodes and a spare; in a resize two nodes that become one."""
    found: dict[str, Any] = {"name": "a", "script": "train.py", "nodes": 2, "workers_per_node": 1}
    found |= {"env": {"STAYS_AT": where}}
    found |= {"checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "peer"}]}}
    return found | ({"elastic": {"min_nodes": 1, "max_nodes": 2}} if where == "in a resize" else {"spares": 1})


def undisturbed(folder: Path, place: LocalPlace, steps: int | None) -> dict[str, Any]:
    """Losses and weights of the same job with nothing killed; `steps`: of one that is to be resized, and is not."""
    found = spec("in a resize" if steps else "nowhere") | {"name": "undisturbed"}
    found["env"] |= {"STEPS": str(steps), "PAUSE": "0"} if steps else {}
    assert start(folder, found).wait() == 0, (folder / "terminal.log").read_text()
    result = call_hp_ext("report", "undisturbed", "-o", "json").json
    return {"losses": result["losses"], "weights": result["weights"]}


def start(folder: Path, job: dict[str, Any]) -> Any:
    """`hp-ext create-job --wait`; what it prints goes to `terminal.log`."""
    (folder / "train.py").write_text(SCRIPT.read_text())
    (folder / "job.yaml").write_text(json.dumps(job))
    command = ["create-job", "-f", str(folder / "job.yaml"), "--wait", "-o", "json"]
    with (folder / "terminal.log").open("wb") as log:
        return warm.start("warm_terminal", command, env=os.environ, log=log)


def carry_out(case: Case, place: LocalPlace, folder: Path) -> Outcome:
    """Start the job, kill, and wait for its end."""
    began = time.monotonic()
    terminal = start(folder, spec(case.where))
    run = run_of(place)
    if case.where == "in a resize":
        until(lambda: any(event["event"] == "step" for event in events_in(run / "events.jsonl")), "no step was made")
        assert call_hp_ext("resize", "a", "--nodes", "1", "--no-wait").code == 0
    until(lambda: (run / "stays").exists() or terminal.poll() is not None, "the job did not come there")
    assert terminal.poll() is None, (folder / "terminal.log").read_text()
    pids = [
        terminal.pid if each.what == "terminal" else VICTIMS[each.what](place, each.number) for each in case.victims
    ]
    (keeper,) = [keeper_of(place)]
    all_of_it = [keeper, *descendants(keeper), terminal.pid]
    before = len(_text(run / "events.jsonl"))
    for number, (victim, pid) in enumerate(zip(case.victims, pids, strict=True)):
        if number and case.order == "then":
            _wait_until_noticed(case.victims[0], run, before)
        if is_alive(pid):  # it may have ended with the first
            os.kill(pid, SIGNALS[victim.how])
    for victim, pid in zip(case.victims, pids, strict=True):
        until(lambda pid=pid: not is_alive(pid), f"{victim} is still there")
    if not any(victim.what in ("engine", "keeper") or victim.how in ("Ctrl-C", "SIGTERM") for victim in case.victims):
        (run / "let-go").touch()  # else the job ends wherever it is
    code = terminal.wait()
    waited = call_hp_ext("wait", "a", "-o", "json")
    if code < 0:  # the terminal is gone, the job may not have been: another one has waited for it
        code = waited.code
    status = call_hp_ext("status", "a", "-o", "json").json
    report = call_hp_ext("report", "a", "-o", "json")
    result = report.json if report.code == 0 else {}
    words = {"status": (status["error"] or {}).get("message", ""), "wait": waited.stderr}
    words["report"] = (result.get("error") or {}).get("message", "")
    said = (
        (folder / "terminal.log").read_text(errors="replace") if terminal.poll() == JobFailedError.exit_code else None
    )
    disagreeing = disagreements(result, {"status": status, "wait": waited.json}, waited, said)
    events = events_in(run / "events.jsonl")
    left = _left(place, run, all_of_it)
    return Outcome(code, status["state"], words, disagreeing, result, events, left, time.monotonic() - began)


def disagreements(
    report: dict[str, Any], others: dict[str, dict[str, Any]], waited: Done, said: str | None
) -> list[str]:
    """Where a job's last word is not the same everywhere: state, message and hint, exit code, last lines.

    Args:
        report: as `hp-ext report` has it.
        others: what `status` and `wait` have, as JSON.
        waited: `hp-ext wait`, as it ended.
        said: the output of the command that ran the job, where it ended by itself and not well.
    """
    ends = ("state", "error")
    wanted = {name: report.get(name) for name in ends}
    found = [f"{who}: {other[name]}" for who, other in others.items() for name in ends if other[name] != wanted[name]]
    if waited.code != (0 if report.get("state") == "succeeded" else JobFailedError.exit_code):
        found.append(f"wait: exit code {waited.code}")
    error = report.get("error") or {"message": f"the job was {report.get('state')}", "hint": ""}
    lines = "\n".join(filter(None, (f"error: {error['message']}", error["hint"] and f"hint: {error['hint']}")))
    printed = {"wait": waited.stderr if waited.code else None, "create-job": said}
    return found + [f"{who} says: {text}" for who, text in printed.items() if text is not None and lines not in text]


def unnamed(case: Case, outcome: Outcome) -> list[str]:
    """Of a job that went on: who was killed and is named nowhere, though it was there to be missed.

    A node that is lost takes its processes with it, and one that ends beside another may go under with it.
    """
    if case.where == "at the end" or outcome.state != "succeeded":
        return []
    causes = [(each["node"], each["cause"]) for each in outcome.result["faults"]]
    causes += [
        (each["node"], each["cause"])
        for each in outcome.events
        if each["event"] in ("node_lost", "memory_lost", "fork_server_lost")
    ]
    ends = {
        "rank": "killed by SIGKILL (9)",
        "agent": "",
        "memory server": "the memory server ended: killed by SIGKILL (9)",
        "fork server": "the process that forks workers killed by SIGKILL (9)",
    }
    named = [
        any(node == victim.number and ends[victim.what] in cause for node, cause in causes)
        for victim in case.victims
        if victim.what in ends
    ]
    enough = any(named) if case.order == "at once" else not named or named[0]
    return [] if enough or not named else [f"{victim}: {causes}" for victim in case.victims]


def _wait_until_noticed(first: Victim, run: Path, before: int) -> None:
    if first.what not in ("rank", "agent", "memory server", "fork server"):
        return  # the end of the whole job, or of nothing: nobody writes an event

    def noticed() -> bool:
        lines = _text(run / "events.jsonl")[before:].splitlines(keepends=True)
        return any(json.loads(line)["event"] in _NOTICED for line in lines if line.endswith("\n"))

    until(noticed, f"nobody noticed the end of {first}")


def _left(place: LocalPlace, run: Path, pids: list[int]) -> list[str]:
    """Processes, zombies, folders and shared memory that outlived the job."""
    made = [json.loads(line) for line in _text(run / "left.jsonl").splitlines(keepends=True) if line.endswith("\n")]
    pids = [*pids, *(each[kind] for each in made for kind in ("pid", "child"))]

    def look() -> list[str]:
        found = [f"process {pid}" for pid in pids if _is_there(pid, pids)]
        found += [f"/dev/shm/{each['segment']}" for each in made if Path(f"/dev/shm/{each['segment']}").exists()]
        return found + [entry.name for entry in place.scratch.iterdir() if entry.name.startswith(_OURS)]

    deadline = time.monotonic() + PATIENCE_S / 5
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found + [left for left in (place.leftovers() if found else []) if left not in found]


def _is_there(pid: int, ours: list[int]) -> bool:
    """Whether it lives, or is a zombie that one of ours has not reaped; the orphans among them are init's."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" or int(parent) in ours


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
