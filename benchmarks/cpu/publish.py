"""Files of a benchmark's results: figures, page and plot in docs/benchmarks, raw rounds in build/benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks"
ROUNDS = ROOT / "build" / "benchmarks"
_WIDTH = 200


def publish(folder: Path, name: str, document: Mapping[str, Any], page: str, rounds: object = None) -> None:
    """Write NAME.json, NAME.md and, if given, the raw rounds as NAME-rounds.json.

    Rounds of published figures go to build/benchmarks, which git ignores; those of other runs next to their figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(as_rows(document) + "\n")
    (folder / f"{name}.md").write_text(page)
    if rounds is not None:
        raw = ROUNDS if folder.resolve() == RESULTS else folder
        raw.mkdir(parents=True, exist_ok=True)
        (raw / f"{name}-rounds.json").write_text(json.dumps(rounds) + "\n")


def as_rows(value: Any, indent: str = "") -> str:
    """JSON in which everything that fits into one line is in one line."""
    line = json.dumps(value)
    if not value or not isinstance(value, dict | list | tuple) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        rows, ends = [f"{json.dumps(str(key))}: {as_rows(each, inner)}" for key, each in value.items()], "{}"
    else:
        rows, ends = [as_rows(each, inner) for each in value], "[]"
    return f"{ends[0]}\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}{ends[1]}"


def save_plot(figure: Any, file: Path) -> None:
    """Save and close a figure of matplotlib; the suffix of `file` is the format. An SVG is made small."""
    import matplotlib
    from matplotlib import pyplot as plt

    is_svg = file.suffix == ".svg"
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if is_svg else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": file.stem}):
        figure.savefig(file, facecolor="white", dpi=110, metadata=metadata)
    plt.close(figure)
    if is_svg:
        file.write_text(small_svg(file.read_text()))


def small_svg(text: str) -> str:
    """The same picture with coordinates of two decimals and one line per group."""
    text = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)
    text = re.sub(r'<!--.*?-->|<g id="[^"]*"\s*/>', "", text, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text).replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return re.sub(r"> <g id", ">\n<g id", text).replace("> <", "><").strip() + "\n"
