"""Drops CUDA graphs that contain collectives before NCCL is aborted, because the abort would wait for these graphs.

A graph contains collectives if collectives were begun during its capture. A dropped graph cannot be replayed, but must
be captured again in the groups of the next generation. NCCL's `commReclaim` waits while `localPersistentRefs` is not 0.
On a GPU, an abort ended if the graph was reset first, and hung if not (docs/gpu.md, E9). This module itself has not run
on a GPU.
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
"""Maximum seconds to wait until a graph replay is queued. A replay that takes longer waits for broken collectives."""


class CapturedGraphs:
    """Tracks all CUDA graphs that this process captures from now on.

    Args:
        begun: function that returns the number of collectives that this process has begun.
        graphs: torch's class CUDAGraph, whose methods are wrapped.
    """

    def __init__(self, begun: Callable[[], int], graphs: Any) -> None:
        self._begun = begun
        self._holding: weakref.WeakSet[Any] = weakref.WeakSet()
        """CUDA graphs that contain collectives."""
        self._dropped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Number of collectives that this process had begun before each graph's capture."""
        self._replaying = threading.Lock()
        for name, method in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            setattr(graphs, name, _wrapped(getattr(graphs, name), method))

    def drop(self) -> None:
        """Reset all graphs that contain collectives. Must be called before communicators are aborted, by any thread."""
        if not self._replaying.acquire(timeout=_REPLAY_S):
            sys.stderr.write(
                "a CUDA graph is being replayed and cannot be dropped: this process may have to be replaced\n"
            )
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
                    "this CUDA graph contains collectives of process groups that a fault has ended",
                    hint="Capture the graph in the training function, which is called again after a fault, and not in "
                    "run.keep.",
                )
            replay(graph)


def _wrapped(method: Callable[..., None], wrapper: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(graph: Any, *arguments: Any, **options: Any) -> None:
        wrapper(method, graph, *arguments, **options)

    return call
