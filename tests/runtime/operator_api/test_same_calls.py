"""The same generated calls to AWS's agent, 1.1.3, and to ours: the same answers, but for what the docs list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from operator_calls import both, sequences
from operator_differences import DIFFERENCES, Comparison, table, unexplained


def compared(seed: int, number: int) -> Comparison:
    """What came of that many sequences; all that differs is a case of a difference that may be."""
    with both() as (theirs, ours):
        comparison = Comparison(theirs, ours)
        for flag, steps in sequences(seed, number):
            comparison.flag = flag
            comparison.run(steps)
    left = unexplained(comparison.found)
    assert not left, f"{len(left)} differences, as\n" + "\n".join(map(str, left[:20]))
    return comparison


def test_the_same_calls_get_the_same_answers() -> None:
    assert compared(seed=0, number=10).calls > 50


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_same_300_sequences_of_calls_get_the_same_answers() -> None:
    comparison = compared(seed=1, number=300)
    assert comparison.calls > 2000
    assert comparison.codes == {200, 404, 405, 409, 422}
    assert comparison.states == {"ready", "running", "completed", "faulted", "stopping", "shutdown"}
    kept = [one for one in DIFFERENCES if one.holds is not None]
    gone = [one.call for one in kept if not any(one.holds and one.holds(seen) for seen in comparison.found)]
    assert gone == [], "these do not differ any more"


def test_the_page_has_every_difference(golden_part: Callable[[str, str, str], None]) -> None:
    golden_part("docs/launchers.md", "operator", table())
