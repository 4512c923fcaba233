"""Live numbers of a job from its pods, read through the Kubernetes API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.metrics import SUMMARY
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.contract.handle import JobHandle

_MOST_PODS = 16
"""Maximum number of queried pods. Nearly always the first pod has the numbers."""


class PodNumbers:
    """Reads the numbers of one job repeatedly.

    Args:
        job: its spec, with the port of the metrics.
    """

    def __init__(self, handle: JobHandle, job: JobConfig) -> None:
        from hyperpod_ext.jobs.kubernetes.jobs import client_of

        self._client, self._handle = client_of(handle), handle
        self._port = job.metrics.port if job.metrics is not None and job.has_agent else 0
        self._last = ""
        """Pod that last returned numbers."""
        self.why = ""
        """Reason why there are no numbers. Empty if there are numbers, or none were requested."""

    def now(self) -> Mapping[str, Any] | None:
        """Return the numbers for `hp-ext top`; None if no pod returns them."""
        if not self._port:
            self.why = "its spec has no `metrics.port` at which pods serve metrics"
            return None
        namespace = self._client.access.namespace
        for pod in self._pods():
            path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{self._port}/proxy{SUMMARY}"
            try:
                found = self._client.get_once(path)
            except HyperpodExtError as error:  # another pod may have become the coordinator
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
    """Return the spec of a job on Kubernetes; None if this version cannot read it, or the target stores none.

    Raises:
        NotFoundError: there is no such job.
    """
    if handle.target not in ("hyperpod-eks", "kubeflow"):
        return None
    from hyperpod_ext.jobs.kubernetes.details import kept_spec

    return kept_spec(handle)
