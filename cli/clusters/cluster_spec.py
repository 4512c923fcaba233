"""Reads a cluster's spec, and gives the library's problems its lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import Loaded


def read_cluster(file: str, overrides: Sequence[str]) -> Loaded[ClusterConfig]:
    """The spec, with the places of its values."""
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import read

    return read(ClusterConfig, file, overrides)


@contextmanager
def with_lines(loaded: Loaded[ClusterConfig]) -> Iterator[None]:
    """Problems raised inside name only fields; outside, the file and the line too."""
    from hyperpod_ext.errors import UnsupportedError

    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(loaded.locate(error.problems)) from None
