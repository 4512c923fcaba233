"""Finds the cause of a job's failure on Kubernetes, in the status of the job's pods and of the operator.

Agents write a termination message to the status of their pods. For a pod that was killed before it wrote a message, the
kubelet's reason is used. The functions are pure and work on plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.last_word import HINT, OF_JOB, OF_NODE

_SAYS_NOTHING = ("Error", "Completed", "ContainerStatusUnknown")
"""Reasons of the kubelet that are not shown, because they contain no more information than the exit code."""
_KILLED = 128
"""A container that a signal killed has an exit code above this number."""
_ASKED = (128 + 15, 128 + 2, 130)
"""Exit codes of processes that ended on SIGTERM or SIGINT, which is not the cause of the job's failure."""


@dataclass(frozen=True, slots=True)
class _End:
    """End of a container of the job."""

    at: str
    """Time of the end, in the API's text form, which sorts by time; empty if the time is unknown."""
    pod: str
    code: int
    how: str
    of_job: bool = False
    """Whether the termination message is from the coordinator's agent and has the cause of the job's failure."""
    by_itself: bool = False
    """Whether the container's own agent reported the reason for the end."""
    hint: str = ""


def last_word(pods: Iterable[Mapping[str, Any]], operator: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the error of a failed job, with the cause of the failure; None if no cause is known.

    The cause is the report of the coordinator's agent, followed by the pods that were killed. The report itself does
    not say that Kubernetes killed pods, only that nodes were lost. If the coordinator's agent wrote no report, the pod
    that ended first is the cause. If no pod has failed, the operator's reason is the cause.

    Args:
        pods: pods of the job, as the API returns them.
        operator: error that the operator reports, or None.
    """
    ends = sorted((end for pod in pods for end in _ends_of(pod)), key=lambda end: (not end.at, end.at))
    of_operator = f"the operator: {operator['message']}" if operator else ""
    led = next((end for end in reversed(ends) if end.of_job), None)
    if led is not None:
        killed = [end.how for end in ends if not end.by_itself and end.code > _KILLED and end.code not in _ASKED]
        seen = f". Kubernetes saw: {'; '.join(dict.fromkeys(killed))}" if killed else ""
        return _error((led.how.removesuffix(".") if seen else led.how) + seen, led.hint)
    if not ends:
        return dict(operator) if operator else None
    by_themselves = [end for end in ends if end.code not in _ASKED] or ends
    words = dict.fromkeys([*(end.how for end in by_themselves), *filter(None, [of_operator])])
    cause, *chain = words
    hint = next((end.hint for end in by_themselves if end.hint), (operator or {}).get("hint", ""))
    return _error(cause + (f". Then: {'; '.join(chain)}" if chain else ""), hint)


def _error(message: str, hint: str) -> dict[str, str]:
    return {"code": "JobFailedError", "message": message, "hint": hint or "see its logs with `hp-ext logs`"}


def _ends_of(pod: Mapping[str, Any]) -> Iterator[_End]:
    name, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    found = False
    for container in status.get("containerStatuses") or []:
        for when in ("lastState", "state"):
            ended = (container.get(when) or {}).get("terminated") or {}
            if ended and ended.get("exitCode") != 0:
                found = True
                yield _end(name, ended)
    if not found and status.get("phase") == "Failed":  # the pod was evicted, or its machine was lost
        why = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
        yield _End(_disrupted_at(status), name, _KILLED + 9, f"pod {name} ended: {why or 'the reason is unknown'}")


def _end(name: str, ended: Mapping[str, Any]) -> _End:
    at, code = str(ended.get("finishedAt") or ""), int(ended.get("exitCode") or 0)
    text, _, hint = str(ended.get("message") or "").partition(HINT)
    if text.startswith(OF_JOB):
        return _End(at, name, code, text.removeprefix(OF_JOB), of_job=True, by_itself=True, hint=hint)
    if text.startswith(OF_NODE):
        node, _, why = text.removeprefix("hyperpod_ext, ").partition(": ")
        how = why if why.startswith(f"{node} ") else f"{node}: {why}"
        return _End(at, name, code, how, by_itself=True, hint=hint)
    reason = str(ended.get("reason") or "")
    words = [reason] if reason and reason not in _SAYS_NOTHING else []
    return _End(at, name, code, f"pod {name} ended: {', '.join([*words, f'exit code {code}'])}")


def _disrupted_at(status: Mapping[str, Any]) -> str:
    of_it = [one for one in status.get("conditions") or [] if one.get("type") == "DisruptionTarget"]
    return str(of_it[0].get("lastTransitionTime") or "") if of_it else ""
