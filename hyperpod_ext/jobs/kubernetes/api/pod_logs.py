"""Reads and merges the logs of a job's pods, while pods are added and removed."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.api.rank_lines import Only

_HAS_OUTPUT = frozenset({"Running", "Succeeded", "Failed"})


@dataclass
class PodLogs:
    """Reader of the logs of all pods that match the label selector `selector`.

    A thread follows each pod's log, and `take` returns the new lines of all pods.
    """

    client: Client
    namespace: str
    selector: str
    only: Only | None = None
    """Rank whose lines are read; None reads the lines of all ranks."""
    pause_s: float = 1.0
    """Seconds to wait before a log stream is reopened, if it ended without a new line."""
    _lines: queue.SimpleQueue[str | BaseException] = field(default_factory=queue.SimpleQueue)
    _readers: dict[str, threading.Thread] = field(default_factory=dict)

    def pods(self) -> list[dict[str, Any]]:
        """Return the job's pods, sorted by the number in their names. Spares and replaced pods are included."""
        found = self.client.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=self.selector)
        return sorted(found, key=lambda pod: _natural(pod["metadata"]["name"]))

    def now(self) -> Iterator[str]:
        """Yield the output that the pods have written until now, pod by pod."""
        for node, pod in enumerate(self.pods()):
            if pod.get("status", {}).get("phase") in _HAS_OUTPUT:
                name = pod["metadata"]["name"]
                for line in self.client.lines(self._path(name), timestamps="true", **_container(pod)):
                    text = _without_time(line)[1]
                    if self._wants(text, node):
                        yield f"{name} | {text}"

    def look_for_pods(self) -> None:
        """Start to follow the log of every pod that has started since the last call."""
        for node, pod in enumerate(self.pods()):
            name, uid = pod["metadata"]["name"], pod["metadata"].get("uid", "")
            if pod.get("status", {}).get("phase") in _HAS_OUTPUT and f"{name}/{uid}" not in self._readers:
                reader = threading.Thread(target=self._follow, args=(name, node, _container(pod)), daemon=True)
                self._readers[f"{name}/{uid}"] = reader
                reader.start()

    def during(self, seconds: float) -> Iterator[list[str]]:
        """Yield lists of new lines of all followed pods for `seconds` seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if lines := self.take(left):
                yield lines

    def take(self, wait_s: float = 0.0) -> list[str]:
        """Return the new lines of all followed pods. Wait up to `wait_s` seconds for the first line."""
        lines: list[str] = []
        try:
            found = self._lines.get(timeout=wait_s) if wait_s else self._lines.get_nowait()
            while not isinstance(found, BaseException):
                lines.append(found)
                found = self._lines.get_nowait()
        except queue.Empty:
            return lines
        if lines:
            self._lines.put(found)  # first return the lines before the error; the next call raises the error
            return lines
        raise found

    def finish(self, wait_s: float = 10.0) -> list[str]:
        """Return the remaining lines after the job has ended.

        Args:
            wait_s: maximum seconds to wait for the end of each pod's log.
        """
        for reader in self._readers.values():
            reader.join(wait_s)
        return self.take()

    def _follow(self, name: str, node: int, container: dict[str, str]) -> None:
        """Read one pod's log to its end. A stream that breaks is reopened after the last line that was received.

        Args:
            name: name of the pod.
            node: index of the pod among the job's pods, sorted by number.
            container: query parameter that selects the container.
        """
        last = ""
        try:
            while True:
                ended = self._ended(name)  # query the phase before reading lines, so that no line is missed
                query = {"timestamps": "true", "follow": "true"} | container | ({"sinceTime": last} if last else {})
                came = False
                for line in self.client.lines(self._path(name), **query):
                    at, text = _without_time(line)
                    if at > last:  # skip lines that were read before: sinceTime has only whole seconds
                        if self._wants(text, node):
                            self._lines.put(f"{name} | {text}")
                        last, came = at, True
                if ended:
                    return
                if not came:
                    time.sleep(self.pause_s)  # wait, because a proxy may close streams without output
        except NotFoundError:
            return  # the pod and its log were deleted
        except (HyperpodExtError, OSError) as error:
            self._lines.put(error)

    def _wants(self, text: str, node: int) -> bool:
        return self.only is None or self.only.takes(text, node)

    def _ended(self, name: str) -> bool:
        phase = self.client.get(self._path(name).removesuffix("/log")).get("status", {}).get("phase")
        return phase in ("Succeeded", "Failed")

    def _path(self, pod: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"


def _container(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the query parameter that selects the training container, which is the pod's first container.

    The API requires the parameter only if the pod has several containers, so it is left out for a single container.
    """
    containers = pod.get("spec", {}).get("containers") or []
    return {"container": str(containers[0]["name"])} if len(containers) > 1 else {}


def _without_time(line: str) -> tuple[str, str]:
    """Split a log line into the time, which Kubernetes adds as a prefix, and the text."""
    at, _, text = line.partition(" ")
    return at, text


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names of pods by value, so that `pod-10` comes after `pod-9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
