"""The trainer and the adapter of examples/21-your-trainer: two kills change no bit and lose no step."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import call_hp_ext

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    "kills",
    [
        ("rank=1@step=14", "rank=0@step=25"),
        ("rank=0@step=10", "rank=1@step=11"),  # the last step of an epoch, and the first of the next one
    ],
)
def test_two_kills_change_no_bit(root: Path, kills: tuple[str, str]) -> None:
    spec = root / "examples" / "21-your-trainer" / "job.yaml"
    options = [word for kill in kills for word in ("--kill", kill)]
    done = call_hp_ext("create-job", "-f", spec, "--target", "local", "--wait", "-o", "json", *options)
    assert done.code == 0, done.stderr
    report = done.json
    seen = tuple(f"rank={each['fault']['rank']}@step={each['fault']['step']}" for each in report["recoveries"])
    assert seen == kills
    assert (report["steps_lost"], report["loss_equal"], report["weights_equal"]) == (0, True, True)
    assert sorted(map(int, report["losses"])) == list(range(1, 31))
