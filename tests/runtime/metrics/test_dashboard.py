"""The dashboard is what Grafana's own types say that a dashboard is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grafana_schema import complaints

DASHBOARD = json.loads((Path(__file__).parents[3] / "templates" / "observability" / "dashboard.json").read_text())


@pytest.mark.slow
@pytest.mark.thorough  # installs types and a compiler
def test_every_field_is_one_that_grafana_knows() -> None:
    assert complaints(DASHBOARD) == []


BREAKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "colorMode": lambda it: it["panels"][0]["options"].update(colorMode="loud"),
    "refresh": lambda it: it["templating"]["list"][1].update(refresh=7),
    "titel": lambda it: it["panels"][7].update(titel="x"),
    "y": lambda it: it["panels"][6]["gridPos"].update(y="0"),
    "lineWidth": lambda it: it["panels"][8]["fieldConfig"]["defaults"].update(custom={"lineWidth": "2"}),
}


@pytest.mark.slow
@pytest.mark.thorough  # installs types and a compiler
def test_what_is_wrong_is_told() -> None:
    broken = copy.deepcopy(DASHBOARD)
    for one in BREAKS.values():
        one(broken)
    said = complaints(broken)
    assert len(said) == len(BREAKS), said


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
