"""The dashboard is what Grafana's own types say that a dashboard is."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_schema import complaints
from made_events import made

from hyperpod_ext.runtime.metrics.meters import Meters

OBSERVABILITY = Path(__file__).parents[3] / "templates" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "dashboard.json").read_text())


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


def test_dashboard_and_alerts_use_metrics_and_labels_that_a_job_exports() -> None:
    """A label that no series has does not fail in Prometheus: a panel is then empty, and an alert never fires."""
    known: dict[str, set[str]] = {}
    meters = Meters.before_any_copy(["peer"])
    meters.add(made(0.0, "copying", tier="peer", failed=1, newest_step=3))
    for family in meters.families(0.0):
        labels = {name for sample in family.samples for name, _ in sample.labels}
        for suffix in ("", "_bucket", "_sum", "_count") if family.kind == "histogram" else ("",):
            known[family.name + suffix] = {"hpx_job", *labels}
    asked = [(target["expr"], target["legendFormat"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked += [(rule["expr"], str(rule["annotations"])) for rule in rules]
    tests = yaml.safe_load((OBSERVABILITY / "alerts.test.yaml").read_text())["tests"]
    asked += [(series["series"], "") for test in tests for series in test["input_series"]]
    assert len(asked) > 30
    for expression, text in asked:
        metrics = set(re.findall(r"\bhpx_\w+", expression)) - {"hpx_job"}
        assert metrics, expression
        assert metrics <= known.keys(), expression
        used = set(re.findall(r"(\w+)=", expression)) | set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)", text)) - {
            "humanize"
        }
        used |= {
            name for names in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", expression) for name in names.split(", ")
        }
        assert used <= set.union(*(known[name] for name in metrics)), (expression, used)


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
