"""What earlier versions wrote can still be read. `data/` holds what they wrote, each named after its commit."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from small_job import MEMORY, trained

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("written", "warning"),
    [
        pytest.param("checkpoint-of-4e73795", "no MAC of its files", id="before manifests had MACs"),
        pytest.param("checkpoint-of-945fa3ef", "", id="format 1"),
    ],
)
def test_a_job_goes_on_from_a_checkpoint_that_an_earlier_version_wrote(make_job, place, written, warning):
    """Step 4 of `SmallJob`, in the format of the commit in the folder's name. Missing MACs cause a warning."""
    undisturbed = trained(make_job(MEMORY), 4)
    shutil.copytree(DATA / written, place.root)
    heir = make_job(MEMORY, place.tier())
    heir.states = undisturbed.states
    with pytest.warns(RuntimeWarning, match=warning) if warning else contextlib.nullcontext():
        assert heir.resume() == 4
    heir.assert_holds(4)


def test_every_kept_checkpoint_is_restored():
    assert {path.name for path in DATA.glob("checkpoint-of-*")} == {"checkpoint-of-4e73795", "checkpoint-of-945fa3ef"}
