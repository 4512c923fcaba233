"""Jobs that another machine submitted: Slurm knows which are ours, and has the files that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.submit.slurm import client as slurm
from hyperpod_ext.submit.slurm.script import COMMENT, NOTE


def newest_of_ours() -> dict[str, slurm.Queued]:
    """Of each name, the newest job of this user that was made here or elsewhere by this tool."""
    found: dict[str, slurm.Queued] = {}
    for queued in sorted(slurm.queued(), key=lambda one: int(one.id)):
        if queued.comment == COMMENT:
            found[queued.name] = queued
    return found


def record_of(queued: slurm.Queued) -> dict[str, Any]:
    """What the machine that submitted the job remembers of it.

    Raises:
        NotFoundError: Slurm does not give out the file that the job was made from.
    """
    try:
        text = slurm.batch_script(queued.id)
    except HyperpodExtError as error:
        hint = f"ask on the machine that submitted it, or look at `scontrol show job {queued.id}`"
        raise NotFoundError(f"the file of job {queued.id} cannot be had: {error.message}", hint=hint) from None
    notes = [line.removeprefix(NOTE) for line in text.splitlines() if line.startswith(NOTE)]
    if not notes:
        raise NotFoundError(f"the file of job {queued.id} holds no spec", hint="was it changed after it was written?")
    job = JobConfig.model_validate_json(notes[0])
    return {
        "id": queued.id,
        "cluster": slurm.cluster_name(),
        "folder": str(Path(queued.folder)),
        "runs": job.slurm.runs,
        "world_size": job.world_size,
        "submitted_at": queued.submitted_at,
    }
