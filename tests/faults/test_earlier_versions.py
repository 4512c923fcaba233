"""What earlier versions wrote can still be read. `data/` holds what they wrote, each named after its commit."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from small_job import MEMORY, trained

CHECKPOINTS = sorted((Path(__file__).parent / "data").glob("checkpoint-of-*"))


@pytest.mark.parametrize("written", CHECKPOINTS, ids=lambda path: path.name.rpartition("-")[2])
def test_a_job_goes_on_from_a_checkpoint_that_an_earlier_version_wrote(make_job, place, written):
    """Step 4 of `SmallJob`. Without MACs, as before 945fa3ef, a warning says so."""
    undisturbed = trained(make_job(MEMORY), 4)
    shutil.copytree(written, place.root)
    bound = '"macs"' in next(written.glob("*/manifest.json")).read_text()
    heir = make_job(MEMORY, place.tier())
    heir.states = undisturbed.states
    with contextlib.nullcontext() if bound else pytest.warns(RuntimeWarning, match="no MAC of its files"):
        assert heir.resume() == 4
    heir.assert_holds(4)
