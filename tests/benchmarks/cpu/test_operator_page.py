"""What the benchmark of the operator's pods concludes from what it measured."""

from __future__ import annotations

from operator_page import UNTIL_START, gaps_of, make_document, make_page, make_table

SECONDS = {
    "exception": {"ours": [0.03, 0.02, 0.05], "hyperpodrun": [0.3, 0.4, 0.2]},
    "kill -9": {"ours": [0.1], "hyperpodrun": [0.9], "hyperpodrun alone": [3.0], UNTIL_START: [0.02]},
}


def test_all_aims_are_met() -> None:
    document = make_document(SECONDS, True, "command")
    assert all(document["aims"].values())
    assert "| exception | 0.03 (0.02 to 0.05) | 0.30 (0.20 to 0.40) | - | - | 10.0 | - |" in make_table(document)
    assert "| 3.00 (3.00 to 3.00) | 0.02 (0.02 to 0.02) | 9.0 | 30.0 |" in make_table(document)
    assert "NOT met" not in make_page(document)


def test_each_aim_that_is_missed_is_said() -> None:
    slow = {"kill -9": {"ours": [0.3], "hyperpodrun": [1.2]}, "hang": {"ours": [2.0]}}
    assert [aim for aim, met in make_document(slow, False, "command")["aims"].items() if not met] == [
        "kill -9: our agent takes at most 1/5 of the seconds of hyperpodrun",
        "kill -9 under hyperpodrun: at most 1.0 s",
        "all runs came to the same losses and weights, bit for bit",
    ]
    assert "| hang | 2.00 (2.00 to 2.00) | - | - | - | - | - |" in make_table(make_document(slow, True, "command"))


def test_a_gap_is_what_lies_between_two_parts_beyond_an_ordinary_step() -> None:
    first = [(0, 1.0), (1, 1.1), (0, 1.2), (1, 1.3), (0, 1.4), (1, 1.5)]
    later = [(1, 1.9), (0, 2.0), (1, 2.1)]
    steps = [{"generation": 1, "rank": rank, "t": t} for rank, t in first]
    steps += [{"generation": 2, "rank": rank, "t": t} for rank, t in later]
    assert [round(gap, 6) for gap in gaps_of(steps, "generation")] == [0.2]
    assert gaps_of(steps[:6], "generation") == []
