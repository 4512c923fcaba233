"""Section of a job's spec for the metrics of the running job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config

SUMMARY = "/summary"
"""HTTP path with the numbers for `hp-ext top`, on the same port as /metrics."""


class Metrics(Config):
    """Metrics of the running job over HTTP, in the format of Prometheus: step, loss, faults, goodput, seconds by phase.

    The node with the job's coordinator serves the metrics. The metrics are readable without authentication.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """TCP port of the metrics. 0: any free port; the event log then has the port."""
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address on which the metrics are served. Default: all interfaces, so that Prometheus can scrape pods. With
    127.0.0.1, only the same machine can read the metrics."""
