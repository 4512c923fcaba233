"""Whether a page shows the figures of the report's JSON."""

from __future__ import annotations

import math
import re
from typing import Any


def check_figures(shown: dict[str, tuple[str, str]], result: dict[str, Any]) -> None:
    """Every figure on a page is the JSON's, and its text says the same, as exactly as it is shown."""
    known = _flat(result)
    for key, (value, text) in shown.items():
        assert float(value) == known[key], key
        number = float(re.match(r"[-\d.]+", text).group())  # type: ignore[union-attr]
        scale = 100 if "%" in text else 1 / (1 << 20) if "bytes" in key else 1
        scale /= {"min": 60, "h": 3600}.get(text.rpartition(" ")[2], 1)
        digits = len(text.partition(".")[2].split(" ")[0])
        assert math.isclose(number, known[key] * scale, abs_tol=0.5001 * 10**-digits), f"{key}: {text}"
    for rank, seconds in result["phases"].items():
        for phase, took in seconds.items():
            assert f"phases.{rank}.{phase}" in shown or not took, f"the page does not show {phase} of rank {rank}"
    assert {"goodput", "steps", "steps_lost", "seconds.wall"} <= shown.keys()


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = ((str(index), each) for index, each in enumerate(value))
    else:
        return {path: value}
    return {key: leaf for name, each in items for key, leaf in _flat(each, f"{path}.{name}" if path else name).items()}
