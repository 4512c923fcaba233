"""Where a job that runs shows its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config

SUMMARY = "/summary"
"""Path of what `hp-ext top` shows, beside /metrics."""


class Metrics(Config):
    """Numbers of the running job over HTTP, in the format of Prometheus: step, loss, faults, goodput, seconds by phase.

    The node that coordinates serves them, and another one when that is lost. Whoever reaches the port can read them.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """TCP port. 0: any free one, which the event log then names."""
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address to listen on: every interface, as pods are scraped from outside. 127.0.0.1 where that is not wanted."""
