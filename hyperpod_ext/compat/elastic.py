"""AWS's elastic training (`hyperpod_elastic_agent`): the runtime itself stops ranks for a change of the nodes."""

from __future__ import annotations

import signal

__all__ = ["elastic_event_detected"]


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Return False: `run.steps` stops all ranks after the same step, and the job continues with other nodes."""
    return False
