"""When a checkpoint's manifest is written: once all parts are there, and by nobody who was followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ext.errors import StaleGenerationError
from hyperpod_ext.runtime.memory_server.upload import Upload
from hyperpod_ext.runtime.memory_server.upload_queue import UploadTask
from hyperpod_ext.runtime.storage.checkpoints import CheckpointProgress
from hyperpod_ext.runtime.storage.object_store import Cancelled


class Place:
    """Checkpoints in a store, as one node sees them: others bring their parts while it looks."""

    def __init__(self, work: UploadTask, others_done: list[bool], followed: bool = False) -> None:
        self.committed = 0
        self.store = SimpleNamespace(url="memory:")
        self._work, self._others_done, self._followed = work, others_done, followed
        self._mine: set[int] = set()

    def until(self, cancelled: object) -> Place:
        return self

    def fence(self, generation: int, step: int, run: str) -> None:
        pass

    def check_not_followed(self, generation: int, run: str) -> None:
        if self._followed:
            raise StaleGenerationError("another run")

    def put_record(self, folder: str, node: int, manifests: object) -> None:
        pass

    def record(self, folder: str, node: int) -> list[Any]:
        return []

    def put_done(self, folder: str, node: int, macs: object) -> None:
        self._mine.add(node)

    def macs(self, folder: str, node: int) -> dict[str, Any]:
        return {}

    def progress(self, folder: str) -> CheckpointProgress:
        """One look at the folder; after the last one the step is given up."""
        done = frozenset(self._mine)
        if self._mine:
            others = self._others_done.pop(0)
            done |= {1} if others else set()
            self._work.dropped = not self._others_done
        return CheckpointProgress(frozenset({self._work.node, 1}), done, frozenset(), frozenset(), complete=False)

    def commit(self, *_: object, **__: object) -> bool:
        self.committed += 1
        return True


def delivery(place: Any, run: str = "") -> Upload:
    due: Any = SimpleNamespace(is_passed=lambda work, now: False, waiting=False)
    made = Upload(place, SimpleNamespace(), lambda digest: None, due, on_bytes=lambda count: None)  # type: ignore[arg-type]
    if run:
        made.entered[1] = (0, run)
    return made


def test_it_is_committed_once_all_nodes_have_brought_their_part():
    work = UploadTask(10, 1, "g1-s10", nodes=2, node=0)
    place = Place(work, [False, False, True])
    assert delivery(place).bring(work)
    assert place.committed == 1


def test_that_all_have_said_what_they_will_bring_is_not_enough():
    work = UploadTask(10, 1, "g1-s10", nodes=2, node=0)
    place = Place(work, [False, False])
    with pytest.raises(Cancelled):
        delivery(place).bring(work)
    assert place.committed == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_that_another_has_followed_commits_nothing(nodes: int):
    work = UploadTask(10, 1, "g1-s10", nodes=nodes, node=0)
    place = Place(work, [True], followed=True)
    with pytest.raises(StaleGenerationError):
        delivery(place, "this run").bring(work)
    assert place.committed == 0


def test_a_run_that_nobody_has_followed_commits():
    work = UploadTask(10, 1, "g1-s10", nodes=1, node=0)
    place = Place(work, [])
    assert delivery(place, "this run").bring(work)
    assert place.committed == 1


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def clear(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_slow_node_of_a_high_number_commits_before_its_patience_is_over(monkeypatch):
    """With `skip` the others may have gone on, and nobody else is there to do it."""
    clock = Clock()
    monkeypatch.setattr("hyperpod_ext.runtime.memory_server.upload.time", clock)
    work = UploadTask(10, 1, "g1-s10", nodes=2, node=400)
    place = Place(work, [True] * 2000)
    its = delivery(place)
    its.wake = clock  # type: ignore[assignment]
    assert its.bring(work)
    assert place.committed == 1
    assert clock.now < 60
