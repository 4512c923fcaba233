"""Import every job file below a folder, and report the outcome of each file.

The outcome is `carried` (imported completely), `named` (imported; the lost settings are listed) or `refused`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.config.files.load import text_of
from hyperpod_ext.counts import count
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.placeholders import helm_refused

LARGEST_BYTES = 4 * 2**20
"""Maximum size of a job file in bytes."""
_NO_JOBS = (".md", ".py", ".txt", ".ipynb", ".png", ".dockerfile")


@dataclass
class FolderReport:
    """Outcome of the import of each file."""

    files: list[dict[str, Any]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the number of files with each outcome (`carried`, `named` or `refused`)."""
        found = Counter(str(one["outcome"]) for one in self.files)
        return {name: found[name] for name in ("carried", "named", "refused")}

    def to_json(self) -> dict[str, object]:
        """Return the number of files, the number of files with each outcome, and the outcome of every file."""
        return {"files": len(self.files), **self.counts(), "results": self.files}

    def to_text(self) -> str:
        """Return one line for each file, then a line with the number of files with each outcome."""
        lines = []
        for one in self.files:
            first = f": {one['problems'][0]}" if one["problems"] else ""
            more = f" ({len(one['left_out'])} named)" if one["left_out"] else ""
            lines.append(f"{one['outcome']:8} {one['file']}{more}{first}")
        counts = ", ".join(f"{number} {name}" for name, number in self.counts().items())
        return "\n".join([*lines, f"{count(len(self.files), 'file')}: {counts}"])


def import_folder(folder: Path, values: Mapping[str, Any]) -> FolderReport:
    """Import every file below `folder` that may be a job file, in the order of their names.

    Args:
        values: values for the placeholders of templates, or for the variables of sbatch files.

    Raises:
        ConfigError: the folder is a Helm chart.
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
