"""Metrics of jobs without our agent. Each memory server sends its node's events to node 0's memory server, which
exports the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.kept import moved, read_kept
from hyperpod_ext.runtime.events.reading import parse_line, read_followed
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.metrics.numbers import Numbers
from hyperpod_ext.runtime.storage.object_store import ObjectStore

_TIMEOUT_S = 5.0
_AGAIN_S = 30.0
"""Seconds until events are sent again after node 0 did not answer."""
_AT_ONCE = 20_000
"""Maximum number of event lines that wait to be sent to node 0. If more lines wait, the oldest lines are dropped."""


class NodeNumbers:
    """Collects one node's events for the job's metrics. On node 0, also computes the metrics from all nodes' events."""

    def __init__(self, config: RuntimeConfig, store: ObjectStore | None, secret: bytes) -> None:
        self._config, self._store, self._secret = config, store, secret
        self._epoch = time.time() - time.monotonic()
        self._numbers: Numbers | None = None
        self._first: PeerClient | None = None
        self._at: tuple[str, int] | None = None
        self._waiting: list[str] = []
        self._not_before = 0.0

    def enter(self, node: int, first: tuple[str, int] | None, event: Callable[..., None]) -> None:
        """Begin a new generation of the job, in which this node has number `node`.

        Args:
            first: address of node 0's memory server.
            event: function that logs an event.
        """
        if self._config.metrics is None:
            return
        if node == 0 and self._numbers is None:
            self._numbers = Numbers(self._config, self._past(), event)
        if node != 0 and first is not None and first != self._at:
            self._first, self._at, self._not_before = self._peer(first), first, 0.0

    def _peer(self, first: tuple[str, int]) -> PeerClient:
        return PeerClient(*first, self._secret, _TIMEOUT_S, encrypted=self._config.encrypted)

    def _past(self) -> list[Event]:
        """Return the events that earlier runs have uploaded, so that counters continue from earlier values. Times are
        converted to this machine's monotonic clock."""
        if self._store is None:
            return []
        try:
            return [moved(event, -self._epoch) for event in read_kept(self._store).events]
        except HyperpodExtError:
            return []

    def add(self, lines: Iterable[bytes]) -> None:
        """Queue events of this node, which `forward` then sends to node 0."""
        if self._config.metrics is not None:
            self._waiting += [line.decode(errors="replace") for line in lines]

    def forward(self) -> None:
        """Send the queued events to node 0. On node 0, count the queued events in the metrics."""
        if self._waiting and self._numbers is not None:
            self.receive(self._epoch, self._waiting)
            self._waiting = []
        elif self._waiting and self._first is not None and time.monotonic() >= self._not_before:
            try:
                self._first.send_events(self._epoch, self._waiting)
                self._waiting = []
            except HyperpodExtError:
                self._not_before = time.monotonic() + _AGAIN_S
        self._waiting = self._waiting[-_AT_ONCE:]

    def receive(self, epoch: float, lines: Sequence[str]) -> None:
        """Count a node's events in the metrics. `epoch` is the Unix time at which the node's monotonic clock was 0."""
        if self._numbers is not None:
            self._numbers.take(self._read(epoch - self._epoch, lines))

    def _read(self, behind: float, lines: Iterable[str]) -> Iterator[Event]:
        for line in lines:
            entry = parse_line(line)
            if entry is not None and (event := read_followed(entry)) is not None:
                yield moved(event, behind)
