"""Models that are parts of several outputs."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output

Request = dict[str, Any]
"""A request to an AWS API, with AWS's field names."""


class ErrorOutput(Output):
    """Output of a command that fails, with `-o json`. A command with wrong options (exit code 2) prints no
    ErrorOutput."""

    error: ErrorDetails


class Defect(Output):
    """A damaged file."""

    file: str
    message: str
