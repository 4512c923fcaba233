"""A job that is rendered, imported, written as a spec and rendered again: nothing of it is another."""

from __future__ import annotations

from hyperpod_ext.config.files.load import load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import get_target
from hyperpod_ext.jobs.import_any import import_file

FILES = {
    "hyperpod-eks": "job.yaml",
    "kubeflow": "job.yaml",
    "hyperpod-slurm": "job.sbatch",
    "sagemaker": "create_training_job.json",
}
"""Of each target, the file that is imported."""


def goes_round(job: JobConfig, target: str, files: dict[str, str]) -> None:
    """`files` are what `job` renders to; the spec that people get of them renders to the same bytes."""
    found = import_file(files[FILES[target]], FILES[target])
    assert (found.job, found.target, found.left_out) == (job, target, [])
    again = load_text(JobConfig, found.to_yaml())
    assert again == job
    assert get_target(target).render(again, None) == files
