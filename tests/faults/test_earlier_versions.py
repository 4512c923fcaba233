"""What earlier versions wrote can still be read. `data/` holds what they wrote, each named after its commit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_job import MEMORY, trained

CHECKPOINTS = sorted((Path(__file__).parent / "data").glob("checkpoint-of-*"))


@pytest.mark.parametrize("written", CHECKPOINTS, ids=lambda path: path.name.rpartition("-")[2])
def test_a_job_goes_on_from_a_checkpoint_that_an_earlier_version_wrote(make_job, place, written):
    """Step 4 of `SmallJob`, from before manifests had MACs: that is said, beside."""
    undisturbed = trained(make_job(MEMORY), 4)
    shutil.copytree(written, place.root)
    heir = make_job(MEMORY, place.tier())
    heir.states = undisturbed.states
    with pytest.warns(RuntimeWarning, match="no MAC of its files"):
        assert heir.resume() == 4
    heir.assert_holds(4)
