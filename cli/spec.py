"""Reads what a command is asked to work on: the job, its cluster, and what options change in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from hyperpod_ext.config.cluster import ClusterConfig
    from hyperpod_ext.config.job import JobConfig
    from hyperpod_ext.config.load import Loaded
    from hyperpod_ext.config.overrides import Override
    from hyperpod_ext.errors import Problem
    from hyperpod_ext.launch.plan import Plan


class Specs:
    """The loaded files of one command.

    Raises:
        ConfigError: with the problems of both files.
    """

    def __init__(self, job_file: str, cluster_file: str | None, overrides: Sequence[str | Override]) -> None:
        from hyperpod_ext.config.cluster import ClusterConfig
        from hyperpod_ext.config.job import JobConfig
        from hyperpod_ext.config.load import read
        from hyperpod_ext.errors import ConfigError

        self._file = job_file
        problems: list[Problem] = []
        loaded: Loaded[JobConfig] | None = None
        self.cluster: ClusterConfig | None = None
        try:
            loaded = read(JobConfig, job_file, overrides)
        except ConfigError as error:
            problems += error.problems
        if cluster_file is not None:
            try:
                self.cluster = read(ClusterConfig, cluster_file).config
            except ConfigError as error:
                problems += error.problems
        if problems or loaded is None:
            raise ConfigError(problems)
        self._loaded = loaded
        self.job = loaded.config

    def check(self, target: str | None) -> None:
        """What job, cluster and target together show, with the lines of the job's file."""
        from hyperpod_ext.errors import UnsupportedError
        from hyperpod_ext.launch.plan import find_problems

        problems = find_problems(self.job, self.cluster, target)
        if problems:
            raise UnsupportedError(self._loaded.locate(problems))

    def plan(self, target: str) -> Plan:
        """The checked plan; its warnings are said at once."""
        from hyperpod_ext.launch.plan import make_plan

        self.check(target)
        plan = make_plan(self.job, self.cluster, target, Path(self._file).parent)
        for warning in plan.warnings:
            say(f"warning: {warning}")
        return plan

    def without_faults(self) -> None:
        """Rehearse nothing; a comparison stays one."""
        if self.job.chaos is not None:
            calm = self.job.chaos.model_copy(update={"faults": ()})
            self.job = self.job.model_copy(update={"chaos": calm})
