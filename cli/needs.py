"""Checks that the Python packages that a command needs are installed."""

from __future__ import annotations

from collections.abc import Iterable


def need_packages(*names: str, places: Iterable[str | None] = ()) -> None:
    """Check that Python packages are installed, and boto3 if one of the places is in S3.

    Raises:
        HyperpodExtError: packages are missing. The error's hint has the command that installs all of them.
    """
    from hyperpod_ext.errors import HyperpodExtError
    from hyperpod_ext.extras import missing_packages

    s3 = ["boto3"] if any((place or "").startswith("s3://") for place in places) else []
    if (missing := missing_packages(*names, *s3)) is not None:
        raise HyperpodExtError(f"{missing[0]} not installed", hint=missing[1])
