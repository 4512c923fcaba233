"""Every mutant of `make test-mutants` can still be applied: what it changes is there, and who must see it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mutants.__main__ import judge
from mutants.catalog import MUTANTS
from mutants.forked import Result, Task
from mutants.table import Mutant, Source, TableError


def test_there_are_sixty_and_no_two_are_alike() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert len({(mutant.source.where, mutant.text, mutant.wrong) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant, root: Path) -> None:
    compile(mutant.applied(mutant.source.read(root)), mutant.source.path, "exec")
    assert mutant.promise.endswith(".")
    assert [test for test in mutant.tests if not (root / test).is_file()] == []


def test_a_source_is_found_by_its_modules_name() -> None:
    assert Source("hyperpod_ext.runtime.ipc.messages", ()).path == "hyperpod_ext/runtime/ipc/messages.py"
    assert Source("hyperpod_ext.cli.checkpoints.prune", ()).path == "cli/checkpoints/prune.py"
    assert Source("templates/local/node.sh.j2", ()).path == "templates/local/node.sh.j2"


@pytest.mark.parametrize("text", ["gone", "twice"])
def test_a_text_that_is_not_there_once_is_told_with_what_to_do(text: str) -> None:
    mutant = Source("hyperpod_ext.a", ()).mutant("a.b", "A promise.", text, "other")
    with pytest.raises(TableError, match=r"mutant a\.b: its text occurs [02] times in hyperpod_ext/a\.py") as caught:
        mutant.applied("twice twice")
    assert "A promise." in str(caught.value)
    assert "change the entry's text" in str(caught.value)


def test_a_file_that_has_moved_is_told(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"no hyperpod_ext/a\.py: it has moved"):
        Source("hyperpod_ext.a", ()).read(tmp_path)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ({"code": 1, "failed": ["test_a.py::test_b"], "passed": 3}, "caught"),
        ({"code": 0, "passed": 3}, "SURVIVED"),
        ({"code": 0}, "mistake"),  # nothing but skipped tests
        ({"code": 5}, "mistake"),  # no test was collected
        ({"code": 4}, "mistake"),  # no such file
        ({"code": 2, "uncollected": ["test_a.py"]}, "mistake"),  # it cannot be imported
        ({"code": 1, "uncollected": ["test_a.py"], "failed": ["test_c.py::test_d"]}, "mistake"),
        ({"code": -9, "failed": ["test_a.py::test_b"]}, "mistake"),  # it did not end by itself
    ],
)
def test_only_a_test_that_fails_has_caught_a_mutant(result: dict[str, Any], verdict: str) -> None:
    mutant = Source("hyperpod_ext.a", ("test_a.py",)).mutant("a.b", "A promise.", "text", "other")
    judged = judge(mutant, "first line\nsome text", Result(Task("a.b", mutant.tests), seconds=1.0, **result))
    assert (judged.verdict, judged.place) == (verdict, "hyperpod_ext/a.py:2")
    assert judged.by == ("test_a.py::test_b" if verdict == "caught" else "")
