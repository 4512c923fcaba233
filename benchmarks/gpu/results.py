"""What the experiments found: one JSON file and one page in Markdown, replaced after each experiment.

`plan.py` records results here; people read the page, programs the JSON. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hyperpod_ext.files import write_atomically

Outcome = Literal["passed", "failed", "not run"]
JSON_FILE, PAGE_FILE = "results.json", "results.md"
NO_TIME = "no time left"


class NotRunError(Exception):
    """An experiment cannot be made here; the text says why."""


class Figure(NamedTuple):
    """A measured value."""

    value: float | int | str | bool
    unit: str = ""

    def __str__(self) -> str:
        text = f"{self.value:.3g}" if isinstance(self.value, float) else str(self.value)
        return f"{text} {self.unit}".rstrip()


Figures = dict[str, Figure]


class FailedError(Exception):
    """What was expected did not come, and these figures show it."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Result:
    """Of one experiment."""

    outcome: Outcome
    reason: str = ""
    """Why it failed, or was not run."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0
    """That it took."""
    output: Sequence[str] = ()
    """Last lines of what it printed, when it failed."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Result:
        figures = {name: Figure(one["value"], one["unit"]) for name, one in raw["figures"].items()}
        return cls(raw["outcome"], raw["reason"], figures, raw["seconds"], raw["output"])

    def to_json(self) -> dict[str, Any]:
        figures = {name: figure._asdict() for name, figure in self.figures.items()}
        return {**asdict(self), "figures": figures, "output": list(self.output)}


@dataclass(frozen=True)
class Row:
    """An experiment as the page names it."""

    name: str
    shows: str
    expected: str


@dataclass
class Results:
    """Of one machine and lane, in the order of the plan."""

    lane: str
    machine: Mapping[str, str]
    rows: Sequence[Row]
    found: dict[str, Result] = field(default_factory=dict)

    def of(self, name: str) -> Result:
        return self.found.get(name, Result("not run", "not reached"))

    def write(self, folder: Path) -> None:
        """Replace both files: readers see a whole one at any time."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JSON_FILE, json.dumps(self.to_json(), indent=2) + "\n")
        write_atomically(folder / PAGE_FILE, self.page())

    def to_json(self) -> dict[str, Any]:
        experiments = {
            row.name: {"shows": row.shows, "expected": row.expected, **self.of(row.name).to_json()} for row in self.rows
        }
        return {"lane": self.lane, "machine": dict(self.machine), "experiments": experiments}

    def page(self) -> str:
        versions = "".join(f"- {name}: {value}\n" for name, value in self.machine.items())
        titles = "| | shows | expected | outcome | figures | took |\n| --- | --- | --- | --- | --- | --- |\n"
        table = "".join(self._line(row) for row in self.rows)
        failed = "".join(_failure(row.name, self.of(row.name)) for row in self.rows)
        return f"# Experiments, lane {self.lane}\n\n{versions}\n{titles}{table}{failed}"

    def _line(self, row: Row) -> str:
        result = self.of(row.name)
        cells = [row.name, row.shows, row.expected, self.outcome(row.name), _figures(result), f"{result.seconds:.0f} s"]
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"

    def text(self, name: str) -> str:
        """For who watches: outcome, figures, and what a failed experiment printed."""
        result, row = self.of(name), next(row for row in self.rows if row.name == name)
        figures = [f"    {key}: {figure}" for key, figure in result.figures.items()]
        printed = [f"    | {line}" for line in result.output]
        return "\n".join([f"{name} ({row.shows}): {self.outcome(name)}", *figures, *printed])

    def outcome(self, name: str) -> str:
        """In words, with the lane where that is no GPU."""
        result = self.of(name)
        where = " (fake)" if self.lane == "fake" and result.outcome != "not run" else ""
        reason = f": {result.reason.splitlines()[0]}" if result.reason else ""
        return f"{result.outcome}{where}{reason}"


def _figures(result: Result) -> str:
    return "; ".join(f"{name}: {figure}" for name, figure in result.figures.items())


def _failure(name: str, result: Result) -> str:
    if result.outcome != "failed":
        return ""
    output = "\n".join(result.output)
    return f"\n## {name} failed\n\n{result.reason}\n\n```\n{output}\n```\n"


def read(folder: Path) -> tuple[str, dict[str, Result]] | None:
    """Lane and results that an earlier command left in this folder; None: there are none."""
    file = folder / JSON_FILE
    if not file.exists():
        return None
    raw = json.loads(file.read_text())
    return raw["lane"], {name: Result.from_json(one) for name, one in raw["experiments"].items()}
