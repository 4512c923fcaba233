"""Reads a cluster's spec, and adds file and line to problems that the library finds in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..output import say
from ..spec import known_ids

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import Loaded

F = TypeVar("F", bound=Callable[..., Any])


def read_cluster(file: str, overrides: Sequence[str]) -> Loaded[ClusterConfig]:
    """Return the cluster's spec from `file`, with the line of each value."""
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.error_messages import NO_FIELD
    from hyperpod_ext.config.files.load import read
    from hyperpod_ext.errors import ConfigError, Problem

    try:
        return read(ClusterConfig, file, overrides)
    except ConfigError as error:
        unknown = {one.path for one in error.problems if one.message == NO_FIELD}
        if unknown.isdisjoint(("script", "command")) or all(one.path != "region" for one in error.problems):
            raise
        hint = f"name the spec of a cluster; `hp-ext create-job -f {file}` submits a job"
        raise ConfigError([Problem("is the spec of a job, not of a cluster", source=file, hint=hint)]) from None


def ignore_option(function: F) -> F:
    """Add the option `--ignore` to a command. The option refuses unknown ids of checks, because an unknown id would
    have no effect."""
    return click.option(
        "--ignore",
        "ignored",
        multiple=True,
        metavar="HPX201",
        callback=lambda _context, _option, names: _known(names),
        help="Skip this check. Repeatable.",
    )(function)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        return names
    from hyperpod_ext.clusters.checks import REGISTRY

    return known_ids(REGISTRY, names)


def say_warnings(loaded: Loaded[ClusterConfig], ignored: Sequence[str]) -> None:
    """Print on stderr the warnings of checks of the spec, and a warning if built-in facts about AWS are outdated."""
    from datetime import UTC, datetime

    from hyperpod_ext.catalog.age import stale
    from hyperpod_ext.clusters.checks import findings

    if old := stale(datetime.now(UTC).date()):
        say(
            f"warning: built-in facts about AWS are old: {', '.join(f'{one.file} of {one.dated}' for one in old)}; "
            "`hp-ext doctor` shows all"
        )

    for problem in loaded.locate(findings(loaded.config, "warning", ignored)):
        say(f"warning: {problem}")


@contextmanager
def with_lines(loaded: Loaded[ClusterConfig]) -> Iterator[None]:
    """Add file and line to the problems of an error that is raised in the `with` block."""
    from hyperpod_ext.errors import UnsupportedError

    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(loaded.locate(error.problems)) from None
