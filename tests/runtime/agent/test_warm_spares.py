"""Processes that wait to become a worker: who takes an order, and who does not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from waiting import until

from hyperpod_ext.runtime.agent import worker_main
from hyperpod_ext.runtime.agent.fork_server import WarmSpares


class Forked:
    """Children of this process, which is the agent and the fork server."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def __call__(self, run: Callable[[], NoReturn]) -> int:
        if (pid := os.fork()) == 0:  # its own stderr: pytest has put another in its place
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            try:
                run()
            finally:
                os._exit(70)
        self.pids.append(pid)
        return pid

    def wait(self, pid: int) -> int:
        self.pids.remove(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def forked() -> Iterator[Forked]:
    children = Forked()
    yield children
    for pid in children.pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.fixture
def spares(forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmSpares:
    """Of a node with two GPUs, on which workers write down what they are asked."""

    def run(order: dict[str, Any], agent_pid: int) -> NoReturn:
        (tmp_path / "order").write_text(json.dumps([order, agent_pid]))
        os._exit(7)

    monkeypatch.setattr(worker_main, "main", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    return WarmSpares(forked, os.getpid())


def order_of(local_rank: int) -> dict[str, Any]:
    return {"argv": ["train.py", "x" * 100_000], "env": {"LOCAL_RANK": str(local_rank)}}


def test_a_worker_becomes_of_the_spare_of_its_gpu(spares: WarmSpares, forked: Forked, tmp_path: Path) -> None:
    first, second = spares.keep([0, 1])
    assert until(lambda: spares.take(order_of(1))) == second
    assert forked.wait(second) == 7
    assert json.loads((tmp_path / "order").read_text()) == [order_of(1), os.getpid()]
    assert spares.take(order_of(1)) is None
    (third,) = spares.keep([0, 1])
    assert until(lambda: spares.take(order_of(1))) == third
    assert first in forked.pids


def test_a_node_without_a_gpu_has_none(spares: WarmSpares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert spares.keep([0, 1]) == []


def test_the_process_that_forks_does_not_ask_for_gpus_itself(
    spares: WarmSpares, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def count() -> int:
        with (tmp_path / "asked").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return 1

    monkeypatch.setattr(torch.cuda, "device_count", count)
    for _ in range(2):
        assert spares.keep([]) == []
    (asked,) = (tmp_path / "asked").read_text().split()
    assert int(asked) != os.getpid()


def test_a_node_that_cannot_say_has_none(spares: WarmSpares, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.delattr(torch.cuda, "device_count")
    assert spares.keep([0, 1]) == []
    assert "AttributeError" in capfd.readouterr().err


def test_a_spare_whose_context_is_not_made_yet_takes_no_order(spares, forked, monkeypatch, tmp_path) -> None:
    os.mkfifo(go := tmp_path / "go")  # whoever opens it to read waits for a writer; a pipe's end would be closed
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: go.read_bytes())
    (pid,) = spares.keep([0])
    assert spares.take(order_of(0)) is None
    go.write_bytes(b"1")
    assert until(lambda: spares.take(order_of(0))) == pid


def test_a_spare_without_room_on_its_gpu_ends_and_takes_none(spares, forked, monkeypatch, capfd) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    (pid,) = spares.keep([0])
    assert forked.wait(pid) == 0
    assert "no warm spare for local rank 0: 1024 MiB of its GPU are free, less than 5120 MiB" in capfd.readouterr().err
    assert spares.take(order_of(0)) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    (another,) = spares.keep([0])
    assert until(lambda: spares.take(order_of(0))) == another


def test_a_spare_that_was_killed_takes_none(spares: WarmSpares, forked: Forked) -> None:
    (pid,) = spares.keep([0])
    os.kill(pid, 9)
    assert forked.wait(pid) == -9
    assert spares.take(order_of(0)) is None


def test_spares_end_with_the_fork_server(spares: WarmSpares, forked: Forked) -> None:
    pids = spares.keep([0, 1])
    spares.forget()
    assert [forked.wait(pid) for pid in pids] == [0, 0]
