"""Why a job on Kubernetes failed, from its pods and from what the operator says: the first cause, and what came of it.

Our agents leave their last word in the status of their pods. A pod that was killed leaves none: what the kubelet
says of it stands beside. Pure, over plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.last_word import HINT, OF_JOB, OF_NODE

_SAYS_NOTHING = ("Error", "Completed", "ContainerStatusUnknown")
"""Reasons of the kubelet that add nothing to an exit code."""
_KILLED = 128
"""Exit codes above are those of containers that a signal has ended."""
_ASKED = (128 + 15, 128 + 2, 130)
"""Of those, what was led to end: that came of something else."""


@dataclass(frozen=True, slots=True)
class _End:
    """How one container has ended."""

    at: str
    """As the API has it: text that sorts as time does. Empty: nobody knows."""
    pod: str
    code: int
    how: str
    of_job: bool = False
    """Whether it is why the whole job failed, by the account of the agent that led it."""
    by_itself: bool = False
    """Whether an agent of ours says it."""
    hint: str = ""


def last_word(pods: Iterable[Mapping[str, Any]], operator: Mapping[str, str] | None) -> dict[str, str] | None:
    """Why the job failed; what the operator says where the pods tell nothing.

    What the agent that led the job says stands, followed by the pods that were killed, which it saw as lost at most.
    Without it the pod that ended first is the cause.
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
    return {"code": "JobFailedError", "message": message, "hint": hint or "its logs may tell more"}


def _ends_of(pod: Mapping[str, Any]) -> Iterator[_End]:
    name, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    found = False
    for container in status.get("containerStatuses") or []:
        for when in ("lastState", "state"):
            ended = (container.get(when) or {}).get("terminated") or {}
            if ended and ended.get("exitCode") != 0:
                found = True
                yield _end(name, ended)
    if not found and status.get("phase") == "Failed":  # evicted, or its machine is gone
        why = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
        yield _End(_disrupted_at(status), name, _KILLED + 9, f"pod {name} ended: {why or 'nobody says why'}")


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
