"""CUDA graphs that hold collectives. NCCL's abort waits until they are gone, so they are dropped before it begins.

A graph holds collectives if some were begun while it was captured. One that was dropped cannot be replayed: it is to be
captured again, in the next generation's groups. Source: `commReclaim` of NCCL, which waits while `localPersistentRefs`
is not 0. A GPU has shown that an abort ends if the graph was reset before, and else hangs (docs/gpu.md, E9). This
module has not run on one.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hyperpod_ext.errors import JobFailedError

_REPLAY_S = 1.0
"""How long a replay may take to be queued; one that takes longer waits for the very collectives."""


class CapturedGraphs:
    """Graphs of this process, from here on.

    Args:
        begun: how many collectives this process has begun.
        graphs: torch's class of graphs, whose methods are wrapped.
    """

    def __init__(self, begun: Callable[[], int], graphs: Any) -> None:
        self._begun = begun
        self._holding: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs that hold collectives."""
        self._dropped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Collectives begun when the capture of a graph began."""
        self._replaying = threading.Lock()
        for name, method in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            setattr(graphs, name, _wrapped(getattr(graphs, name), method))

    def drop(self) -> None:
        """Reset all that hold collectives. From any thread, before communicators are aborted."""
        if not self._replaying.acquire(timeout=_REPLAY_S):
            sys.stderr.write("a CUDA graph is replayed and cannot be dropped: this process may have to be replaced\n")
            return
        try:
            for graph in list(self._holding):
                graph.reset()
                self._dropped.add(graph)
            self._holding.clear()
        finally:
            self._replaying.release()

    def _begin(self, capture_begin: Callable[..., None], graph: Any, *arguments: Any, **options: Any) -> None:
        self._before[graph] = self._begun()
        self._dropped.discard(graph)
        capture_begin(graph, *arguments, **options)

    def _end(self, capture_end: Callable[..., None], graph: Any) -> None:
        if self._begun() > self._before.pop(graph):
            self._holding.add(graph)
        capture_end(graph)

    def _replay(self, replay: Callable[..., None], graph: Any) -> None:
        with self._replaying:
            if graph in self._dropped:
                raise JobFailedError(
                    "this CUDA graph holds collectives of a generation that is over",
                    hint="Capture it in the training function, which is called again after a fault, not in run.keep.",
                )
            replay(graph)


def _wrapped(method: Callable[..., None], wrapper: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(graph: Any, *arguments: Any, **options: Any) -> None:
        wrapper(method, graph, *arguments, **options)

    return call
