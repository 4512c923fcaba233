"""Live metrics of a job for `hp-ext top`, read from its pods through the Kubernetes API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.metrics import SUMMARY
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.contract.handle import JobHandle

_MOST_PODS = 16
"""Maximum number of pods that are queried. Usually the first pod that is queried has the metrics."""


class PodNumbers:
    """Reads the metrics of one job repeatedly.

    Args:
        job: spec of the job, with the port at which its pods serve metrics.
    """

    def __init__(self, handle: JobHandle, job: JobConfig) -> None:
        from hyperpod_ext.jobs.kubernetes.jobs import client_of

        self._client, self._handle = client_of(handle), handle
        self._port = job.metrics.port if job.metrics is not None and job.has_agent else 0
        self._last = ""
        """Name of the pod that returned metrics most recently and is queried first; empty if no pod returned
        metrics."""
        self.why = ""
        """Reason why the last call of `now` returned no metrics; empty if `now` succeeded or was never called."""

    def now(self) -> Mapping[str, Any] | None:
        """Return the metrics for `hp-ext top`; None if no queried pod returns metrics."""
        if not self._port:
            self.why = "its spec has no `metrics.port` at which pods serve metrics"
            return None
        namespace = self._client.access.namespace
        for pod in self._pods():
            path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{self._port}/proxy{SUMMARY}"
            try:
                found = self._client.get_once(path)
            except HyperpodExtError as error:  # try the next pod: the coordinator may have moved
                self.why = error.message
                continue
            if found:
                self._last, self.why = pod, ""
                return found
        return None

    def _pods(self) -> list[str]:
        from hyperpod_ext.jobs.kubernetes.details import pods_of

        running = [str(pod["metadata"]["name"]) for pod in pods_of(self._client, self._handle, running=True)]
        return sorted(running, key=lambda name: name != self._last)[:_MOST_PODS]


def spec_of(handle: JobHandle) -> JobConfig | None:
    """Return the spec that was stored with a job on Kubernetes.

    Returns None if the target stores no spec, or this version cannot read the spec.

    Raises:
        NotFoundError: there is no such job.
    """
    if handle.target not in ("hyperpod-eks", "kubeflow"):
        return None
    from hyperpod_ext.jobs.kubernetes.details import kept_spec

    return kept_spec(handle)
