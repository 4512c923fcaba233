"""Reads a cluster's spec, and gives the library's problems its lines."""

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
    """The spec, with the places of its values."""
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import read

    return read(ClusterConfig, file, overrides)


def ignore_option(function: F) -> F:
    """`--ignore`, checked: a misspelt id would ignore nothing, and nobody would notice."""
    return click.option(
        "--ignore",
        "ignored",
        multiple=True,
        metavar="HPX201",
        callback=lambda _context, _option, names: _known(names),
        help="Leave this check out; may come again.",
    )(function)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        return names
    from hyperpod_ext.clusters.checks import REGISTRY

    return known_ids(REGISTRY, names)


def say_warnings(loaded: Loaded[ClusterConfig], ignored: Sequence[str]) -> None:
    """What the checks warn of, on stderr, and facts about AWS that they go by and that are old."""
    from datetime import UTC, datetime

    from hyperpod_ext.catalog.age import stale
    from hyperpod_ext.clusters.checks import findings

    if old := stale(datetime.now(UTC).date()):
        say(f"warning: facts about AWS are old: {', '.join(f'{one.file} of {one.dated}' for one in old)}; see doctor")

    for problem in loaded.locate(findings(loaded.config, "warning", ignored)):
        say(f"warning: {problem}")


@contextmanager
def with_lines(loaded: Loaded[ClusterConfig]) -> Iterator[None]:
    """Problems raised inside name only fields; outside, the file and the line too."""
    from hyperpod_ext.errors import UnsupportedError

    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(loaded.locate(error.problems)) from None
