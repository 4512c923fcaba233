"""Generated calls that AWS's agent, 1.1.3, has answered: ours answers the same, but for what the docs list."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from operator_calls import Ours, episodes


def test_the_same_calls_get_the_same_answers() -> None:
    for number, episode in enumerate(episodes()):
        with closing(Ours()) as ours:
            for step in episode.before:
                ours.take(step)
            for one in episode.recorded:
                assert ours.take(one.step) == one.wanted, (number, one.step, one.rows)


def test_the_recording_has_all_codes_and_states_and_the_page_every_difference(root: Path) -> None:
    recorded = [one for episode in episodes() for one in episode.recorded]
    assert {one.wanted.get("code", 200) for one in recorded} == {200, 404, 405, 409, 422}
    page = (root / "docs" / "launchers.md").read_text().partition("<!-- operator -->")[2].partition("<!-- end -->")[0]
    rows = {row for one in recorded for row in one.rows}
    assert {row for row in rows if f"| {row} |" not in page} == set()
    assert all(bool(one.ours) == bool(one.rows) for one in recorded)
    assert len(rows) > 15
