"""Graphs that hold collectives are dropped before communicators are aborted; the others stay. No GPU is needed."""

from __future__ import annotations

import gc
import threading

import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.process_group.nccl.captured_graphs import CapturedGraphs
from hyperpod_ext.runtime.process_group.nccl_backend import Nccl


class Job:
    """Has begun some collectives, and graphs of a class of its own."""

    def __init__(self) -> None:
        self.begun, self.done = 0, list[str]()
        job = self

        class Graph:
            """As torch's, of which each call is written down."""

            def capture_begin(self, pool: object = None) -> None:
                job.done.append("captured")

            def capture_end(self) -> None:
                pass

            def replay(self) -> None:
                job.done.append("replayed")

            def reset(self) -> None:
                job.done.append("reset")

            def abort(self) -> None:
                job.done.append("aborted")

        self.graphs = CapturedGraphs(lambda: self.begun, Graph)
        self.make = Graph

    def captured(self, collectives: int) -> object:
        graph = self.make()
        graph.capture_begin(pool=None)
        self.begun += collectives
        graph.capture_end()
        graph.replay()
        self.done.clear()
        return graph


def test_a_graph_with_collectives_is_gone_before_the_abort() -> None:
    job = Job()
    graph = job.captured(collectives=2)
    nccl = Nccl(lambda: {"all": job.make()}, lambda: None, job.graphs.drop)
    nccl.enter(2, lasting=False)
    nccl.abort()
    nccl.abort()
    with nccl.ending():
        assert job.done == ["reset", "aborted"]
    with pytest.raises(JobFailedError, match="contains collectives of process groups that a fault has ended") as caught:
        graph.replay()
    assert "not in run.keep" in str(caught.value.hint)


def test_a_graph_that_is_captured_again_is_replayed_and_dropped_again() -> None:
    job = Job()
    graph = job.captured(collectives=1)
    job.graphs.drop()
    graph.capture_begin()
    job.begun += 1
    graph.capture_end()
    graph.replay()
    job.graphs.drop()
    assert job.done == ["reset", "captured", "replayed", "reset"]


def test_a_graph_without_collectives_stays() -> None:
    job = Job()
    graph = job.captured(collectives=0)
    job.begun += 1
    job.graphs.drop()
    graph.replay()
    assert job.done == ["replayed"]


def test_a_graph_that_the_script_has_given_up_is_not_kept() -> None:
    job = Job()
    job.captured(collectives=1)
    gc.collect()
    job.graphs.drop()
    assert job.done == []


def test_a_replay_that_does_not_come_back_does_not_hold_the_abort_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hyperpod_ext.runtime.process_group.nccl.captured_graphs._REPLAY_S", 0.01)
    job = Job()
    queued, free = threading.Event(), threading.Event()
    job.make.replay = lambda graph: (queued.set(), free.wait(60))  # type: ignore[method-assign]
    graphs = CapturedGraphs(lambda: job.begun, job.make)
    graph = job.make()
    thread = threading.Thread(target=graph.replay)
    thread.start()
    assert queued.wait(60)
    graphs.drop()
    assert "cannot be dropped" in capsys.readouterr().err
    free.set()
    thread.join()
