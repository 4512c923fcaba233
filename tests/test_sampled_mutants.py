"""Changes that `make sample-mutants` draws, the tests that it shows them to, and its judgement."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
from mutants.drawn import draw, make, sites
from mutants.forked import Result, Task

sample = pytest.importorskip("mutants.sample", reason="needs coverage")

SOURCE = '''\
"""A docstring 1."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import x

LIMIT: int = 3


@decorated(1)
def f(a: int = 4, *, b: bool = True) -> int:
    """Another."""
    if a < 5 and not b:
        g(a, b=b, help="no")
        raise ValueError
    self.x = 1
    return a
'''


def changed(kind: str) -> list[str]:
    """Each changed line that a kind of change makes of SOURCE."""
    found = []
    for site in (one for one in sites("hyperpod_ext/a.py", SOURCE) if one.kind == kind):
        made = make(site, SOURCE, random.Random(1))
        assert made is not None
        before, after = SOURCE.splitlines(), made.text.splitlines()
        found += [line.strip() for line, was in zip(after, before, strict=True) if line != was]
    return found


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("branch", ["if False:"]),
        ("return value", ["return None"]),
        ("argument", ["g(a, help='no')"]),
        ("boolean", ["if ((a < 5) or (not b)):", "if a < 5 and bool(b):"]),
        ("statement", ["pass", "pass", "pass"]),
    ],
)
def test_each_kind_changes_what_it_says(kind: str, lines: list[str]) -> None:
    assert changed(kind) == lines


def test_numbers_and_comparisons_change_outside_of_annotations_decorators_and_docstrings() -> None:
    numbers = ["LIMIT: int ", "def f(a: int ", "def f(a: int ", "if a < (4) and not b:", "self.x "]
    assert [line.partition("=")[0] for line in changed("constant")] == numbers
    assert changed("comparison")[0] in ("if (a <= 5) and not b:", "if (a >= 5) and not b:")


def test_a_site_knows_whether_it_runs_when_its_module_is_imported() -> None:
    found = {(site.kind, site.lines[0]): site.inside for site in sites("hyperpod_ext/a.py", SOURCE)}
    assert (found["constant", 7], found["constant", 11], found["branch", 13]) == (False, False, True)


def test_a_seed_draws_the_same_again(root: Path) -> None:
    first, again = ([(one.name, one.after) for one in draw(root, 3, 5, "hyperpod_ext/planner")] for _ in range(2))
    assert first == again
    assert first != [(one.name, one.after) for one in draw(root, 4, 5, "hyperpod_ext/planner")]
    for one in draw(root, 3, 5, "cli"):
        assert ast.dump(ast.parse(one.text)) != ast.dump(ast.parse((root / one.site.file).read_text()))


@pytest.mark.parametrize(
    ("result", "verdict", "by"),
    [
        ({"code": 1, "failed": ["t.py::a"], "passed": 1}, "caught", "t.py::a"),
        ({"code": 2, "uncollected": ["t.py"]}, "caught", "t.py"),
        ({"code": -9, "passed": 1}, "caught", ""),
        ({"code": 0, "passed": 2}, "survived", ""),
        ({"code": 0}, "not run", ""),
        ({"code": 4}, "not run", ""),
    ],
)
def test_a_change_is_caught_by_a_test_that_fails(result: dict[str, Any], verdict: str, by: str) -> None:
    found = sample.verdict(Result(Task("0", ("t.py",)), seconds=1.0, **result))
    assert (found["verdict"], found["by"]) == (verdict, by)


@pytest.fixture
def covered(tmp_path: Path, root: Path) -> Any:
    """A map in which one test of the module's folder and ten of another execute line 13."""
    others = {f"tests/cli/test_b.py::test_{number}": 0.1 for number in range(10)}
    tests = {"tests/planner/test_a.py::test_a": 5.0, "tests/planner/test_a.py::test_b[1]": 6.0} | others
    (tmp_path / "tests-1.json").write_text(json.dumps(tests))
    path = str(root / "hyperpod_ext/planner/a.py")
    for number, test in enumerate(["tests/planner/test_a.py::test_a", *others, "tests/gone.py::test_that_failed"]):
        (tmp_path / f"child-{number}.json").write_text(json.dumps({"test": test, "lines": {path: [13]}}))
    return sample.Covered(tmp_path)


def test_a_change_is_shown_to_quick_tests_and_those_of_its_own_folder(covered: Any) -> None:
    found = {one.kind: one for one in sites("hyperpod_ext/planner/a.py", SOURCE)}
    reach, tests = covered.tests_of(found["branch"])
    assert (reach, len(tests), tests[-1]) == ("line", 8, "tests/planner/test_a.py::test_a")
    assert covered.tests_of(found["return value"]) == ("folder", ["tests/planner/test_a.py::test_a"])
    (limit,) = [one for one in sites("hyperpod_ext/planner/a.py", SOURCE) if one.lines[0] == 7]
    assert covered.tests_of(limit)[0] == "import"
    (elsewhere,) = [one for one in sites("hyperpod_ext/catalog/b.py", SOURCE) if one.kind == "return value"]
    assert covered.tests_of(elsewhere) == ("nowhere", [])


def test_the_share_is_of_all_that_were_drawn() -> None:
    found = [{"kind": "branch", "reach": "line", "verdict": one} for one in ("caught", "survived", "not run", "caught")]
    summary = sample.summed_up(found)
    assert (summary["share"], summary["by kind"]) == (0.5, {"branch": "2 of 4"})
