"""From any file that starts a job to a JobConfig: what the file is, is seen from what is in it."""

from __future__ import annotations

import json

from hyperpod_ext.launch.kubernetes.import_job import Imported, import_job


def import_file(text: str, source: str) -> Imported:
    """Read an sbatch file, a CreateTrainingJob request as JSON, or a job for Kubernetes.

    Raises:
        ConfigError: it is none of them, or what it says is no valid job; names every field.
    """
    if text.startswith("#!") or "\n#SBATCH" in text:
        from hyperpod_ext.launch.targets.hyperpod_slurm_import import import_sbatch

        job, left = import_sbatch(text, source)
        return Imported(job, "hyperpod-slurm", left)
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if isinstance(found, dict) and "TrainingJobName" in found:
        from hyperpod_ext.launch.sagemaker.import_request import import_request

        job, left = import_request(found, source)
        return Imported(job, "sagemaker", left)
    return import_job(text, source)
