"""What a job left behind when it had ended: found, and deleted on order."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from hyperpod_ext.errors import Problem, UnsupportedError
from hyperpod_ext.submit.contract.handle import JobHandle
from hyperpod_ext.submit.contract.targets import get_target

DELETERS = {
    "hyperpod-eks": "hyperpod_ext.submit.kubernetes.leftovers",
    "kubeflow": "hyperpod_ext.submit.kubernetes.leftovers",
}
"""Targets where something stays that can be deleted, and the module that does it."""
_INSTEAD = {
    "local": "files of a job lie below the folder that `hp-ext status` shows",
    "hyperpod-slurm": "Slurm forgets a job by itself; its files lie in the folder that `hp-ext status` shows",
    "sagemaker": "SageMaker keeps training jobs for ever; its files lie below sagemaker.output",
}


class Deleter(Protocol):
    """What a target's module for leftovers can do."""

    def find(self, handle: JobHandle, with_secret: bool) -> list[tuple[str, str]]:
        """Kind and name of each object that the job left, in the order of their deletion."""

    def delete(self, handle: JobHandle, found: list[tuple[str, str]]) -> None:
        """Delete these; those that went by themselves meanwhile are no mistake."""


def get_deleter(target: str) -> Deleter:
    """The module that deletes what jobs of a target left.

    Raises:
        ConfigError: there is no such target.
        UnsupportedError: nothing stays there that could be deleted.
    """
    if target in DELETERS:
        return cast(Deleter, importlib.import_module(DELETERS[target]))
    get_target(target)
    raise UnsupportedError([Problem(f"jobs of target {target} leave no objects", hint=_INSTEAD[target])])
