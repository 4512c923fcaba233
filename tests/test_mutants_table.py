"""Every mutant of `make test-mutants` can still be applied: what it changes is there, and who must see it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.catalog import MUTANTS
from mutants.table import Mutant, Source, TableError


def test_there_are_sixty_and_no_two_are_alike() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == 60
    assert len({(mutant.source.where, mutant.text, mutant.wrong) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant, root: Path) -> None:
    compile(mutant.applied(mutant.source.read(root)), mutant.source.path, "exec")
    assert mutant.promise.endswith(".")
    assert [test for test in mutant.tests if not (root / test).is_file()] == []


def test_a_source_is_found_by_its_modules_name() -> None:
    assert Source("hyperpod_ext.runtime.wire", ()).path == "hyperpod_ext/runtime/wire.py"
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
