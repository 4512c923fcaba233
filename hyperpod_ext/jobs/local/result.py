"""Result of a local job, made from the agents' report, the agents' exit codes, and the comparison run without faults.

The functions are pure and work on plain JSON. The module imports only the standard library.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JobReport = dict[str, Any]
_CANCELLED = 130
"""Exit code of an agent whose job was cancelled."""

EMPTY_REPORT: JobReport = {
    "state": "failed",
    "error": None,
    "world_size": 0,
    "generations": 0,
    "steps": 0,
    "resumed_step": 0,
    "resumed_from": "",
    "steps_lost": 0,
    "goodput": 0.0,
    "seconds": {},
    "recoveries": [],
    "nodes_lost": [],
    "spares": [],
    "losses": {},
    "metrics": {},
    "differs_by_rank": [],
    "weights": "",
    "durable": [],
    "warnings": [],
    "loss_equal": None,
    "weights_equal": None,
    "undisturbed": None,
}


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """End of the process of a node's agent, as the engine observed it."""

    node: int
    code: int
    """Exit code of the agent; the negative number of the signal if a signal killed the agent."""
    asked: bool = False
    """Whether the engine had stopped the agent because of an earlier failure."""
    again: bool = False
    """Whether the engine restarted the agent after this end."""


def first_cause(ends: Iterable[NodeEnd], words: Mapping[int, str]) -> tuple[str, list[str]]:
    """Return a sentence about a node's first failure, and a sentence about each later failure.

    The result is empty if no node failed before the engine stopped it.

    Args:
        ends: ends of the agents, oldest first.
        words: reason for its end that each stopped node reported, by the node's number.
    """
    failures = []
    for end in ends:
        if end.code == 0 or end.asked:
            continue
        how = f"node {end.node} ended with exit code {end.code}"
        if end.code < 0:
            how = f"node {end.node} was killed by {signal.Signals(-end.code).name} ({-end.code})"
        elif end.node in words:
            how = words[end.node]
        failures.append(f"{how}, and was started again" if end.again else how)
    return (failures[0], failures[1:]) if failures else ("", [])


def final_report(
    report: JobReport | None, ends: Sequence[NodeEnd], cancelled: bool, log_tail: str, words: Mapping[int, str] = {}
) -> JobReport:
    """Return the final report of a run, made from the agents' report and from the ends of the agents.

    The agents may have written no report, or may have ended differently than their report says. The cause of a failure
    is the cause in the coordinator's report, followed by ends that only the engine observed. If the coordinator
    reported no cause, the cause is the first node that failed by itself.

    Args:
        report: report that the agents wrote; None if they wrote none.
        ends: ends of the agents, oldest first.
        cancelled: whether the job was cancelled.
        log_tail: last lines of the log of the first node that failed.
        words: reason for its end that each stopped node reported, by the node's number.
    """
    final = _as_seen(EMPTY_REPORT | (report or {}), ends)
    if cancelled:
        return final | {"state": "cancelled"}
    # A job may succeed without its lost nodes. Exit codes of spares are ignored, too, because near the job's end the
    # agents may not notice the end of a spare.
    unneeded = [*final["nodes_lost"], *final["spares"]] if final["state"] == "succeeded" else []
    codes = {end.node: end.code for end in ends}
    failed = any(code != 0 and node not in unneeded for node, code in codes.items())
    if report is not None and final["state"] == "succeeded" and not failed:
        return final
    cause, chain = first_cause([end for end in ends if end.node not in unneeded], words)
    if report is not None and (not cause or all(end.code in (0, _CANCELLED) for end in ends if not end.asked)):
        return final  # the report explains the ends: a user stopped the job through an agent
    by_coordinator = report is not None and final["state"] == "failed" and final["error"]
    if by_coordinator and final["error"]["message"] not in words.values():
        seen = [each for each in (cause, *chain) if "ended with exit code" not in each]
        story = f". The engine saw: {'; '.join(seen)}" if seen else ""
        message = final["error"]["message"].removesuffix(".") if seen else final["error"]["message"]
        return final | {"error": final["error"] | {"message": message + story}}
    if words:
        step = f"after step {final['steps']}: " if final["steps"] else ""
        message = f"{step}{cause}" + (f". Then: {'; '.join(chain)}" if chain else "")
    else:
        before = "after its" if report is not None else "without a"
        message = f"{cause or 'node 0 ended with exit code 0'} {before} report\n{log_tail}".rstrip()
    hint = (final["error"] or {}).get("hint") or "see its log"
    return final | {"state": "failed", "error": {"code": "JobFailedError", "message": message, "hint": hint}}


def _as_seen(report: JobReport, ends: Sequence[NodeEnd]) -> JobReport:
    """Add to each fault of a lost node the signal that killed its agent.

    The other agents, which wrote the report, observed only that the node's connection ended.
    """
    killed = {end.node: signal.Signals(-end.code).name for end in ends if end.code < 0 and not end.asked}

    def seen(fault: JobReport) -> JobReport:
        if fault.get("kind") != "lost" or fault["node"] not in killed:
            return fault
        return fault | {"cause": f"{fault['cause']}; its agent was killed by {killed[fault['node']]}"}

    changed = {
        "faults": [seen(fault) for fault in report.get("faults", ())],
        "recoveries": [recovery | {"fault": seen(recovery["fault"])} for recovery in report["recoveries"]],
    }
    return report | {name: value for name, value in changed.items() if value}


def same(main: Mapping[str, Any], undisturbed: Mapping[str, Any] | None, field: str) -> bool | None:
    """Return whether `field` is equal in the main run and in the run without faults; None if a run lacks the field.

    If the main run resumed from a checkpoint, it may lack the losses of steps before the checkpoint.
    """
    if undisturbed is None or not main.get(field) or not undisturbed.get(field):
        return None
    expected, resumed = undisturbed[field], main.get("resumed_step") or 0
    if field == "losses":
        expected = {step: loss for step, loss in expected.items() if int(step) > resumed or step in main[field]}
    return bool(main[field] == expected)


def make_result(name: str, handle: str, main: JobReport, undisturbed: JobReport | None) -> JobReport:
    """Return the result of a job, as `create-job --wait -o json` prints it.

    Args:
        main: report of the main run.
        undisturbed: report of the comparison run without faults; None if there was no such run.
    """
    result = main | {"name": name, "target": "local", "handle": handle}
    result |= {
        "loss_equal": same(main, undisturbed, "losses"),
        "weights_equal": same(main, undisturbed, "weights"),
        "undisturbed": None,
    }
    if undisturbed is None:
        return result
    result["undisturbed"] = {
        "steps": undisturbed["steps"],
        "seconds": undisturbed["seconds"].get("wall"),
        "goodput": undisturbed["goodput"],
    }
    # add the losses of the run without faults only if they differ from the losses of the main run
    if result["loss_equal"] is False:
        result["undisturbed"]["losses"] = undisturbed["losses"]
    if main["state"] == "succeeded" and undisturbed["state"] != "succeeded":
        result["state"] = undisturbed["state"]
        cause = undisturbed["error"] or {"code": "JobFailedError", "message": undisturbed["state"], "hint": ""}
        message = f"the job succeeded, but the run without faults for comparison failed: {cause['message']}"
        result["error"] = cause | {"message": message}
    return result


def without_supervisor(report: JobReport) -> JobReport:
    """Return the report of a run whose keeper was killed. The state of a run that the keeper's death ended becomes
    `failed`."""
    if report["state"] != "cancelled":
        return report  # the run ended before the keeper was killed
    message = "the process that supervises the job's engine was killed, which ended the job"
    hint = "submit the job again: it continues from its newest durable checkpoint, if it has one"
    return report | {"state": "failed", "error": {"code": "JobFailedError", "message": message, "hint": hint}}


def without_numbers(name: str, handle: str, result: Mapping[str, Any], why: str) -> JobReport:
    """Return a short result without numbers: the job's state, error and warnings.

    Args:
        result: complete result of the job.
        why: reason why the complete result could not be stored.
    """
    kept = {each: result[each] for each in ("state", "error", "world_size") if each in result}
    kept["warnings"] = [f"{why}; the result has no numbers", *result.get("warnings", ())]
    return make_result(name, handle, EMPTY_REPORT | kept, None)


def lost_result(name: str, handle: str, message: str, log: str, ends: Iterable[NodeEnd] = ()) -> JobReport:
    """Return the result of a job whose engine died.

    Args:
        message: message about the end of the engine.
        log: path of the engine's log.
        ends: ends of agents that the engine recorded before it died, oldest first.
    """
    cause, chain = first_cause(ends, {})
    message += f". Before: {'; '.join([cause, *chain])}" if cause else ""
    error = {"code": "JobFailedError", "message": message, "hint": f"see {log}"}
    return make_result(name, handle, EMPTY_REPORT | {"error": error}, None)
