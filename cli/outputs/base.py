"""Parts of several outputs."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output

Request = dict[str, Any]
"""A request to an AWS API, with AWS's field names."""


class ErrorOutput(Output):
    """Printed under `-o json` by every command that fails, unless its options are wrong (exit code 2)."""

    error: ErrorDetails


class Defect(Output):
    """A damaged file."""

    file: str
    message: str
