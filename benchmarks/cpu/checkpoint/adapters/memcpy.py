"""The floor as a system: per-tensor copy_ into touched memory, at once or in a thread beside the step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from checkpoint.adapters import Adapter
from checkpoint.state import State, locals_of
from checkpoint.timing import Floor


class Memcpy(Adapter):
    _copying: Future[None] | None = None

    def prepare(self, state: State) -> None:
        self._floor = Floor(locals_of(state))
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._floor.copy).result()

    def save(self, state: State, step: int) -> None:
        self._floor.copy()

    def begin(self, state: State, step: int) -> None:
        self._copying = self._thread.submit(self._floor.copy)

    def wait_staged(self) -> None:
        if self._copying:
            self._copying.result()
