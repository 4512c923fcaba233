"""Published results: figures without raw rounds, pages that follow from them, and small plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checkpoint.page
import control_plane.page
import data
import operator_page
import pytest
import rank_store.page
import recovery_page
import rendezvous_page
from publish import RESULTS, as_rows, publish, small_svg

PAGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "checkpoint": checkpoint.page.make_page,
    "control-plane": control_plane.page.make_page,
    "data": data.make_page,
    "operator": operator_page.make_page,
    "recovery": recovery_page.make_page,
    "rendezvous": rendezvous_page.make_page,
    "store": rank_store.page.make_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_follows_from_the_figures_next_to_it(name: str) -> None:
    figures = json.loads((RESULTS / f"{name}.json").read_text())
    assert PAGES[name](figures) == (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_figures_are_kept_in_few_lines(file: Path) -> None:
    text = file.read_text()
    assert as_rows(json.loads(text)) + "\n" == text
    assert text.count("\n") < 600, "raw rounds belong in build/benchmarks"


def test_a_value_that_fits_into_a_line_is_in_one() -> None:
    rows = {"short": [1, 2], "long": [{"name": "x" * 120, "n": number} for number in (1, 2)], "none": {}}
    lines = as_rows(rows).split("\n")
    assert lines[1] == ' "short": [1, 2],'
    assert [line.count("x") for line in lines] == [0, 0, 0, 120, 120, 0, 0, 0]
    assert json.loads("\n".join(lines)) == rows


def test_raw_rounds_of_another_folder_are_next_to_its_figures(tmp_path: Path) -> None:
    publish(tmp_path, "some", {"median": 1}, "# Page\n", [[0.5], [1.5]])
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {"some.json": '{"median": 1}\n', "some.md": "# Page\n", "some-rounds.json": "[[0.5], [1.5]]\n"}


def test_an_svg_has_two_decimals_and_a_line_a_group() -> None:
    text = '<svg>\n <!-- x -->\n <g id="a">\n  <path d="M 1.23456 2.0004 \nL -3.5 4"/>\n </g>\n <g id="b"/>\n</svg>\n'
    assert small_svg(text) == '<svg>\n<g id="a"><path d="M 1.23 2 L -3.5 4"/></g></svg>\n'
