"""Every mutant of `make test-mutants` can still be applied: what it changes is there, and who must see it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.catalog import MUTANTS
from mutants.table import Mutant


def test_there_are_sixty_and_no_two_are_alike() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert len({(mutant.source.where, mutant.text, mutant.wrong) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant, root: Path) -> None:
    compile(mutant.applied(mutant.source.read(root)), mutant.source.path, "exec")
    assert mutant.promise.endswith(".")
    assert [test for test in mutant.tests if not (root / test).is_file()] == []
