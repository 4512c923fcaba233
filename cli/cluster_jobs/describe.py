"""The command `hp-ext describe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..command import JOB, Command, output_option, target_option
from ..output import columns, print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext describe tiny-gpt
  hp-ext describe gpt-7b --target hyperpod-eks --events 50
  hp-ext describe gpt-7b --target hyperpod-eks -o json""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@click.option(
    "--events", type=click.IntRange(min=0), default=12, show_default=True, help="Show only the newest N events."
)
@output_option()
def command(job: str, target: str, events: int, output: str) -> None:
    """Show the state of one job. On Kubernetes, also show the job's pods, why pods wait, and the job's events."""
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import DETAILS, get_target

    from ..report.runs import why_failed

    handle = JobHandle.parse(job, target)
    found: dict[str, Any] = {"conditions": None, "pods": None, "events": None}
    found |= get_target(handle.target).status(handle).to_json()
    if DETAILS.offered(handle.target):
        found |= DETAILS.of(handle.target).details(handle)
    found["error"] = why_failed(handle, found)
    print_result(found, output, text(found, events))


def text(found: Mapping[str, Any], most: int) -> str:
    """Return the description of a job as text, with at most `most` of its newest events."""
    step = None if found["step"] is None else f"{found['step']}/{found['of'] or '?'}"
    facts = {"name": found["name"], "state": found["state"], "step": step, "submitted": found["submitted_at"]}
    facts |= {"ended": found["ended_at"], "url": found["handle"], "files": found["folder"]}
    if found["error"] is not None:
        facts["error"] = found["error"]["message"]
    parts = [columns([(name, str(value)) for name, value in facts.items() if value])]
    conditions = [("CONDITION", "STATUS", "SINCE", "")]
    conditions += [
        (str(one["type"]), str(one["status"]), str(one["at"] or "-"), _why(one)) for one in found["conditions"] or []
    ]
    pods = [("POD", "PHASE", "NODE", "RESTARTS", "")]
    pods += [
        (pod["name"], pod["phase"] or "-", pod["node"] or "-", str(pod["restarts"]), pod["why"] or "")
        for pod in found["pods"] or []
    ]
    events = found["events"] or []
    shown = events[len(events) - min(most, len(events)) :]
    happened = [("LAST SEEN", "TIMES", "EVENT", "OF", "")]
    happened += [
        (str(one["at"]), str(one["count"]), str(one["reason"]), one["object"], str(one["message"] or "").strip())
        for one in shown
    ]
    parts += [columns(rows) for rows in (conditions, pods, happened) if len(rows) > 1]
    if left := len(events) - len(shown):
        parts.append(f"{left} older event{'s' * (left > 1)}: --events {len(events)} shows all")
    return "\n\n".join(parts)


def _why(condition: Mapping[str, Any]) -> str:
    words: Sequence[Any] = [condition[key] for key in ("reason", "message") if condition[key]]
    return ": ".join(map(str, words))
