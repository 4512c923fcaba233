"""Replacement for AWS's package for elastic training, `hyperpod_elastic_agent`. The runtime itself stops ranks before a
resize."""

from __future__ import annotations

import signal

__all__ = ["elastic_event_detected"]


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Return False, because the script need not react to a resize.

    `run.steps` stops all ranks after the same step, and the job continues with the new number of nodes.
    """
    return False
