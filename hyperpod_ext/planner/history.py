"""What a job's event log says of its steps and failures. Reads what is whole, and says what is not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.planner.rates import Fit, Rates, fit

_CORRELATED_S = 10.0
"""Nodes that are lost within this time of one another are lost together."""


@dataclass(frozen=True, slots=True)
class History:
    """A job's own numbers. Seconds."""

    nodes: int
    wall_s: float
    step_s: float | None
    """Median of whole steps; None: there was none."""
    process: Fit
    node: Fit
    correlated: Fit
    recovery_s: float | None
    """Median from a fault seen to all ranks going on; None: there was none."""
    warnings: tuple[str, ...] = ()

    def rates(self) -> Rates:
        """Failures per second of one node."""
        counts = f"{self.process.events} of processes, {self.node.events} of nodes, {self.correlated.events} of several"
        source = (
            f"the job's own history: {counts}, in {self.wall_s / 3600:.2f} h on {self.nodes} nodes; "
            "a class without any counts as half of one"
        )
        return Rates(self.process.rate, self.node.rate, self.correlated.rate, source)


def read_history(path: Path) -> History:
    """The history in `path`: an events.jsonl, or the run directory it is in.

    Raises:
        NotFoundError: there is none.
        ConfigError: it cannot be read, or holds no time in which anything could have failed.
    """
    file = path / "events.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        hint = "name an events.jsonl, or the run directory of a job"
        raise NotFoundError(f"there is no file {file}", hint=hint) from None
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}", source=str(file))]) from None
    events, warnings = parse_events(text.splitlines(), str(file))
    return history_of(events, str(file), warnings)


def parse_events(lines: Iterable[str], source: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Events of a log, and what could not be read of it. A last line that was cut off is left out.

    Raises:
        ConfigError: a line in the middle is not an event.
    """
    events, damaged, cut = scan_events(lines, source)
    if damaged is not None:
        raise ConfigError([damaged])
    return events, [f"{source}:{cut}: the last line is cut off; it was left out"] if cut is not None else []


def scan_events(lines: Iterable[str], source: str) -> tuple[list[dict[str, Any]], Problem | None, int | None]:
    """Whole events of a log; the first line in the middle that is none; and the number of a last line that is cut."""
    events: list[dict[str, Any]] = []
    damaged: Problem | None = None
    cut: int | None = None
    for number, line in enumerate(lines, 1):
        if cut is not None:
            hint = "the file is damaged there; remove the line, or name another history"
            damaged = damaged or Problem("is not an event", source=source, line=cut, hint=hint)
            cut = None
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("t"), int | float) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            cut = number
    return events, damaged, cut


def history_of(events: Sequence[Mapping[str, Any]], source: str, warnings: Sequence[str] = ()) -> History:
    """The numbers behind a job's events.

    Raises:
        ConfigError: there are too few events to tell time.
    """
    moments = [float(event["t"]) for event in events]
    wall_s = max(moments, default=0.0) - min(moments, default=0.0)
    if wall_s <= 0:
        message = f"holds {len(events)} events and no time between them: nothing can be concluded"
        hint = "let the job run for a while, or give rates with --rates or --mtbf-hours"
        raise ConfigError([Problem(message, source=source, hint=hint)])
    started: Mapping[str, Any] = next((event for event in events if event["event"] == "job_started"), {})
    nodes = int(started.get("nodes", 0)) or 1
    lost = sorted(float(event["t"]) for event in events if event["event"] == "node_lost")
    together = _together(lost)
    losses = {(event.get("node"), event["t"]) for event in events if event["event"] == "node_lost"}
    died = sum(event["event"] == "fault" and (event.get("node"), event["t"]) not in losses for event in events)
    exposure = wall_s * nodes
    return History(
        nodes=nodes,
        wall_s=wall_s,
        step_s=_step_s(events),
        process=fit(died, exposure),
        node=fit(sum(size == 1 for size in together), exposure),
        correlated=fit(sum(size > 1 for size in together), exposure),
        recovery_s=_recovery_s(events),
        warnings=tuple(warnings),
    )


def _together(moments: Sequence[float]) -> list[int]:
    """How many nodes each event took."""
    sizes: list[int] = []
    for index, moment in enumerate(moments):
        if index and moment - moments[index - 1] <= _CORRELATED_S:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def _step_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    took = [float(e["t"]) - float(e["began"]) for e in events if e["event"] == "step" and "began" in e]
    return median(took) if took else None


def _recovery_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    took, since = [], None
    for event in events:
        if event["event"] in ("fault", "node_lost"):
            since = float(event["t"]) if since is None else since
        elif event["event"] == "go" and since is not None:
            took.append(float(event["t"]) - since)
            since = None
    return median(took) if took else None
