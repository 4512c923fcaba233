"""300 local jobs of which one or two processes are killed, wherever they are: they end as docs/faults.md says.

The last word has the true cause, whoever says it; where the job goes on, it ends bit for bit as an undisturbed one; and
nothing is left behind. `HPX_KILL_SEED` draws other pairs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import killing
import pytest
import whole_run
from endings_table import endings
from kill_cases import (
    COUNT,
    PLACES,
    Case,
    Expected,
    Victim,
    drawn,
    expected,
    quickest_first,
    singles,
    steps_lost_at_most,
    victims,
)
from local_place import LocalPlace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TABLE = endings()
IN_TEST = 3
IN_THOROUGH = 30
"""Each costs about four seconds of CPU."""
CASES = quickest_first(drawn(int(os.environ.get("HPX_KILL_SEED", "0"))), IN_TEST)
RESIZED_STEPS = 400
"""As far as an undisturbed job goes that one that is resized is compared with."""


def each(cases: list[Case]) -> pytest.MarkDecorator:
    marks = [[]] * IN_TEST + [[pytest.mark.thorough]] * (IN_THOROUGH - IN_TEST)
    marks += [[pytest.mark.soak]] * (len(cases) - len(marks))
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]
    )


@pytest.fixture
def undisturbed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Losses and weights of a job that nobody disturbs."""
    resized = request.node.callspec.params["case"].where == "in a resize"

    def make() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            steps = RESIZED_STEPS if resized else None
            return killing.undisturbed(Path(folder), request.getfixturevalue("place"), steps)

    found: dict[str, Any] = whole_run.once(f"kills-undisturbed-{resized}", make)
    return found


@each(CASES)
def test_a_job_ends_as_the_page_says(
    undisturbed: dict[str, Any], place: LocalPlace, tmp_path: Path, case: Case
) -> None:
    found = killing.carry_out(case, place, tmp_path)
    print(found)
    ends = [one for one in expected(case, TABLE) if (one.state, one.code) == (found.state, found.code)]
    assert ends, (expected(case, TABLE), found.state, found.code, found.words)
    if found.state == "succeeded":
        assert found.result["steps_lost"] <= steps_lost_at_most(case)
        common = undisturbed["losses"].keys() & found.result["losses"].keys()
        assert common
        assert {step: found.result["losses"][step] for step in common} == {
            step: undisturbed["losses"][step] for step in common
        }
        if case.where != "in a resize":
            assert (found.result["losses"], found.result["weights"]) == (undisturbed["losses"], undisturbed["weights"])
        assert killing.unnamed(case, found) == []
    elif found.state == "failed":
        for who, word in found.words.items():
            assert any(one.is_told_by(word) for one in ends), (who, word)
    assert found.disagreeing == []
    assert found.left == []


def test_the_cases_are_all_single_ones_and_pairs_drawn_by_a_seed() -> None:
    assert len(CASES) == len(set(CASES)) == COUNT
    assert set(singles()) <= set(CASES)
    assert drawn(7) == drawn(7) != drawn(8)
    assert {case.where for case in CASES if case.order} == set(PLACES)


def test_what_may_follow_is_read_from_the_table() -> None:
    engine, agent, spare = Victim("engine"), Victim("agent", 1), Victim("agent", 2)
    assert expected(Case("in a step", (agent,)), TABLE) == [Expected("succeeded", 0)]
    (end,) = expected(Case("in a step", (agent, engine), "then"), TABLE)
    assert (end.state, end.code) == ("failed", 7)
    assert "engine died" in end.words
    _, lost = expected(Case("in a step", (agent, spare), "then"), TABLE)
    assert lost.is_told_by("node 1 is lost")
    assert lost.is_told_by("after step 6: node 1: its memory server is gone")
    assert not lost.is_told_by("node 12 is lost")
    for case in drawn(1):
        assert expected(case, TABLE)
        assert all(victim in victims(case.where) for victim in case.victims)


def test_the_table_has_every_process_and_every_place() -> None:
    whats = {"coordinator" if victim == Victim("agent", 0) else victim.what for victim in victims("in a step")}
    assert {(row.what, row.where) for row in TABLE} == {(what, at) for what in whats - {"rank"} for at in PLACES}
