"""Import of any supported job file as a JobConfig. The kind of the file is detected from its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.kubernetes.imports.import_job import import_job


def import_file(text: str, source: str, values: Mapping[str, Any] | None = None) -> Imported:
    """Read an sbatch file, a CreateTrainingJob request as JSON, a config.yaml of hyp, or a job for Kubernetes.

    Args:
        text: content of the file.
        source: name of the file for error messages.
        values: values for the placeholders of a template, or for the variables of an sbatch file.

    Raises:
        ConfigError: the file is of no kind that can be imported, or its job is invalid. The error names every invalid
            field.
    """
    try:
        return _read(text, source, values)
    except ConfigError as error:
        raise ConfigError([replace(one, source=one.source or source) for one in error.problems]) from None


def _read(text: str, source: str, values: Mapping[str, Any] | None) -> Imported:
    if text.startswith("#!") or "\n#SBATCH" in text:
        from hyperpod_ext.jobs.slurm.import_sbatch import import_sbatch

        return import_sbatch(text, source, values)
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        found = None
    if isinstance(found, dict) and "TrainingJobName" in found:
        from hyperpod_ext.jobs.sagemaker.import_request import import_request

        return import_request(text, source)
    if text.startswith(("template:", "job_name:")) or "\ntemplate:" in text or "\njob_name:" in text:
        from hyperpod_ext.jobs.kubernetes.imports.import_hyp import import_hyp, is_hyp_config

        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            found = None  # if the text is not YAML, import_job raises the error
        if is_hyp_config(found):
            return import_hyp(text, source)
    return import_job(text, source, values)
