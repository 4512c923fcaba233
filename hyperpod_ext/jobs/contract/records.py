"""Records of the jobs that this machine submitted to clusters: one small file per job, without secrets.

The file of a job is `TARGET/NAME.json`. The folder TARGET is next to the folder of local jobs (see `home`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.files.nearest import suggest_or_list
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.jobs.contract.home import home
from hyperpod_ext.jobs.job_files.json_files import read_checked

if TYPE_CHECKING:
    from pydantic import BaseModel


def remember(target: str, name: str, record: dict[str, Any]) -> None:
    """Store `record` as the newest submission of `name`."""
    folder = _folder(target)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / f"{name}.json", json.dumps(record, indent=2) + os.linesep)


def recall(target: str, name: str, model: type[BaseModel]) -> dict[str, Any]:
    """Return the record of the newest submission of `name` from this machine, checked against `model`.

    Raises:
        NotFoundError: this machine has submitted no job with this name.
        ConfigError: the record is damaged.
    """
    try:
        return read_checked(_folder(target) / f"{name}.json", model)
    except FileNotFoundError:
        hint = suggest_or_list(name, names(target), f"hp-ext list --target {target}")
        raise NotFoundError(f"no {target} job named {name} was submitted from this machine", hint=hint) from None


def names(target: str) -> list[str]:
    """Return the names of all jobs that this machine has submitted to `target`."""
    folder = _folder(target)
    return sorted(file.stem for file in folder.glob("*.json")) if folder.is_dir() else []


def _folder(target: str) -> Path:
    return home().parent / target
