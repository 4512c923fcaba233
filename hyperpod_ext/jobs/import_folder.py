"""Import of every file below a folder, with the outcome of each: carried, named or refused."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.config.files.load import text_of
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.placeholders import helm_refused

LARGEST_BYTES = 4 * 2**20
"""Maximum bytes of a job file."""
_NO_JOBS = (".md", ".py", ".txt", ".ipynb", ".png", ".dockerfile")


@dataclass
class FolderReport:
    """Outcome of each file."""

    files: list[dict[str, Any]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Count the files imported without loss (carried), with named losses (named), and refused."""
        found = Counter(str(one["outcome"]) for one in self.files)
        return {name: found[name] for name in ("carried", "named", "refused")}

    def to_json(self) -> dict[str, object]:
        """Return the counts, then every file."""
        return {"files": len(self.files), **self.counts(), "results": self.files}

    def to_text(self) -> str:
        """Return a line for each file, then the counts."""
        lines = []
        for one in self.files:
            first = f": {one['problems'][0]}" if one["problems"] else ""
            more = f" ({len(one['left_out'])} named)" if one["left_out"] else ""
            lines.append(f"{one['outcome']:8} {one['file']}{more}{first}")
        counts = ", ".join(f"{number} {name}" for name, number in self.counts().items())
        return "\n".join([*lines, f"{len(self.files)} files: {counts}"])


def import_folder(folder: Path, values: Mapping[str, Any]) -> FolderReport:
    """Import every file below `folder` that may be a job, sorted by name.

    Raises:
        ConfigError: the folder is a chart of Helm.
    """
    if (folder / "Chart.yaml").is_file():
        raise helm_refused(str(folder), shlex.quote(str(folder)))
    report = FolderReport()
    for file in sorted(folder.rglob("*")):
        below = file.relative_to(folder)
        if not file.is_file() or file.suffix.lower() in _NO_JOBS or any(part.startswith(".") for part in below.parts):
            continue
        report.files.append({"file": str(below)} | _outcome(file, values))
    return report


def _outcome(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = import_file(text_of(str(file), LARGEST_BYTES), str(file), values)
    except ConfigError as error:
        return _refused([str(problem) for problem in error.problems])
    outcome = "named" if found.left_out else "carried"
    words = {"left_out": found.left_out, "notes": found.notes, "problems": []}
    return {"outcome": outcome, "target": found.target, "job": found.written(), **words}


def _refused(problems: list[str]) -> dict[str, Any]:
    return {"outcome": "refused", "target": None, "job": None, "left_out": [], "notes": [], "problems": problems}
