"""Metrics of a running job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config

SUMMARY = "/summary"
"""Path of the numbers for `hp-ext top`, next to /metrics."""


class Metrics(Config):
    """Metrics of the running job over HTTP, in the format of Prometheus: step, loss, faults, goodput, seconds by phase.

    The coordinator's node serves them. The metrics are readable without authentication.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """TCP port. 0: any free port, which the event log records."""
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address to listen on. Default: all interfaces, so that Prometheus can scrape pods. 127.0.0.1: only this
    machine."""
