"""What a run comes to: the agents' report, their exit codes and the run nobody disturbed, put together.

Pure functions over plain JSON; standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

JobReport = dict[str, Any]

EMPTY_REPORT: JobReport = {
    "state": "failed",
    "error": None,
    "world_size": 0,
    "generations": 0,
    "steps": 0,
    "steps_lost": 0,
    "goodput": 0.0,
    "seconds": {},
    "recoveries": [],
    "nodes_lost": [],
    "losses": {},
    "metrics": {},
    "weights": "",
    "durable": [],
    "warnings": [],
}


def final_report(report: JobReport | None, exit_codes: Sequence[int], cancelled: bool, log_tail: str) -> JobReport:
    """The report of a run, also where the agents could not write one or ended otherwise than it says."""
    final = EMPTY_REPORT | (report or {})
    if cancelled:
        return final | {"state": "cancelled"}
    lost = (report or {}).get("nodes_lost", [])  # the agents went on without those
    failed = [(node, code) for node, code in enumerate(exit_codes) if code != 0 and node not in lost]
    if report is not None and (report.get("state") != "succeeded" or not failed):
        return final
    node, code = failed[0] if failed else (0, 0)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    before = "after its report" if report is not None else "without a report"
    error = {
        "code": "JobFailedError",
        "message": f"node {node} {how} {before}\n{log_tail}".rstrip(),
        "hint": "its log has the rest",
    }
    return final | {"state": "failed", "error": error}


def same(main: Mapping[str, Any], undisturbed: Mapping[str, Any] | None, field: str) -> bool | None:
    """Whether both runs have exactly the same `field`; None when there is nothing to compare."""
    if undisturbed is None or not main.get(field) or not undisturbed.get(field):
        return None
    return bool(main[field] == undisturbed[field])


def make_result(name: str, handle: str, main: JobReport, undisturbed: JobReport | None) -> JobReport:
    """What `create-job --wait -o json` prints."""
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
    if result["loss_equal"] is False:  # else they are those above
        result["undisturbed"]["losses"] = undisturbed["losses"]
    if main["state"] == "succeeded" and undisturbed["state"] != "succeeded":
        result["state"] = undisturbed["state"]
        cause = undisturbed["error"] or {"code": "JobFailedError", "message": undisturbed["state"], "hint": ""}
        message = f"the job succeeded, but the undisturbed run to compare it with did not: {cause['message']}"
        result["error"] = cause | {"message": message}
    return result


def lost_result(name: str, handle: str, message: str, log: str) -> JobReport:
    """The result of a job whose engine died under it."""
    error = {"code": "JobFailedError", "message": message, "hint": f"see {log}"}
    return make_result(name, handle, EMPTY_REPORT | {"error": error}, None)
