"""Keep what experiments found on a GPU, for docs/gpu.md.

    python benchmarks/gpu/record.py build/gpu/results.json [...]

Results of one version of torch replace earlier ones of that version; what was not run replaces nothing. Then
`pytest tests/benchmarks/gpu tests/test_gpu_page.py --update-golden` rewrites its tables. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cpu"), str(HERE.parents[1])]

from publish import as_rows  # noqa: E402
from results import Figure, Row  # noqa: E402

RECORD = HERE.parents[1] / "docs" / "benchmarks" / "gpu.json"
_OF_A_COLUMN = ("torch", "NCCL")
Run = Mapping[str, Any]
"""`machine` and `experiments`, as results.json has them."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="results.json")
    runs = recorded()
    for file in parser.parse_args(arguments).results:
        try:
            found = json.loads(file.read_text())
            if found["lane"] != "GPU":
                parser.error(f"{file} is of lane {found['lane']}: it says nothing of a GPU")
            runs = merged(runs, found)
        except OSError as error:
            parser.error(f"{file} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError) as error:
            parser.error(f"{file} is no results.json of `make test-gpu`: {type(error).__name__}: {error}")
    RECORD.write_text(as_rows(runs) + "\n")
    return 0


def recorded() -> list[Run]:
    """A run for each version of torch, the oldest first."""
    found: list[Run] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    return found


def merged(runs: Sequence[Run], found: Run) -> list[Run]:
    """With what was run of `found` in the place of what was known."""
    kept = ("outcome", "reason", "figures")
    new = {
        name: {key: one[key] for key in kept} | {"reason": one["reason"].partition("\n")[0]}
        for name, one in found["experiments"].items()
        if one["outcome"] != "not run"
    }
    by_torch = {run["machine"]["torch"]: run for run in runs}
    torch = found["machine"]["torch"]
    known = by_torch.get(torch, {"experiments": {}})["experiments"]
    by_torch[torch] = {"machine": found["machine"], "experiments": {**known, **new}}
    return [by_torch[name] for name in sorted(by_torch, key=_version)]


def _version(text: str) -> list[int]:
    return [int(part) for part in text.partition("+")[0].split(".")]


def outcomes(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """The page's table of experiments, with a column for each version of torch."""
    columns = [", ".join(f"{name} {run['machine'][name]}" for name in _OF_A_COLUMN) for run in runs]
    head = _line(["", "what is done", "expected", *columns]) + _line(["---"] * (3 + len(columns)))
    return head + "".join(
        _line([row.name, row.shows, row.expected, *(_outcome(run, row.name) for run in runs)]) for row in rows
    )


def figures(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """And of what they measured."""
    head = _line(["", "figure", *(f"torch {run['machine']['torch']}" for run in runs)])
    lines = [head, _line(["---"] * (2 + len(runs)))]
    for row in rows:
        found = [run["experiments"].get(row.name, {}).get("figures", {}) for run in runs]
        for name in dict.fromkeys(name for each in found for name in each):
            lines.append(_line([row.name, name, *(_figure(each.get(name)) for each in found)]))
    return "".join(lines)


def _outcome(run: Run, name: str) -> str:
    one = run["experiments"].get(name, {"outcome": "not run", "reason": ""})
    return f"{one['outcome']}{': ' if one['reason'] else ''}{one['reason']}"


def _figure(found: Mapping[str, Any] | None) -> str:
    return str(Figure(found["value"], found["unit"])) if found else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
