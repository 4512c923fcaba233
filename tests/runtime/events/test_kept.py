"""Events beside the checkpoints: what processes spool, what a node's memory server makes of it, what is read again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from waiting import until

from hyperpod_ext.errors import NotFoundError, UnreachableError
from hyperpod_ext.runtime.events import kept, spool
from hyperpod_ext.runtime.events.kept import KeptLog, read_kept
from hyperpod_ext.runtime.events.log import checked
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.events.of_training import JobStarted, Step
from hyperpod_ext.runtime.events.spool import SpoolReader, SpoolWriter
from hyperpod_ext.runtime.memory_server.event_log import NodeEventLog
from hyperpod_ext.runtime.storage.file import FileStore


def line(event: str, **fields: Any) -> bytes:
    return checked(event, {"generation": 1, **fields})[1]


def step(number: int, rank: int = 0) -> bytes:
    return line("step", rank=rank, step=number, began=time.monotonic() - 0.5, loss=1.0 / number)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "durable" / "tiny"))


def test_what_two_nodes_kept_is_one_log_in_the_time_of_all(store: FileStore) -> None:
    first, second = KeptLog(store, 0), KeptLog(store, 1)
    second._epoch += 1000  # a machine that was started so much later: the same moment is less on its clock
    now = time.monotonic()
    first.add([line("job_started", world_size=2, nodes=2, spares=0), step(1)])
    second.add([checked("step", {"generation": 1, "rank": 1, "step": 1, "began": now - 1000.2}, now - 1000)[1]])
    for one in (first, second):
        one.flush()
    first.add([step(2)])
    first.flush()
    first.flush()
    log = read_kept(store)
    assert [event.rank for event in log.events.of(Step)] == [1, 0, 0]
    assert log.damaged is None
    assert len(log.events.of(JobStarted)) == 1
    one = log.events.of(Step)[0]
    assert abs(one.t - (now + first._epoch)) < 1e-3
    assert abs(one.took - 0.2) < 1e-3
    assert len(store.list("events/")) == 2, "the newest part grows"


def test_parts_are_bounded_and_what_is_written_twice_is_read_once(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_PART_BYTES", 100)
    log, lines = KeptLog(store, 0), [step(number) for number in range(1, 6)]
    for each in lines:
        log.add([each])
        log.flush()
    again = KeptLog(store, 0)  # its memory server was killed, and another has read the spool from its beginning
    again._name += "again"
    again.add(lines)
    again.flush()
    assert len(store.list("events/")) == 6
    assert [event.step for event in read_kept(store).events.of(Step)] == [1, 2, 3, 4, 5]


def test_a_part_whose_last_line_is_torn_is_read_up_to_it(store: FileStore) -> None:
    log = KeptLog(store, 0)
    log.add([step(1), step(2)])
    log.flush()
    (part,) = (Path(store.url.removeprefix("file://")) / "events").iterdir()
    part.write_bytes(part.read_bytes()[:-30])
    found = read_kept(store)
    assert [event.step for event in found.events.of(Step)] == [1]
    assert found.damaged is None
    assert "the last line is cut off" in found.notes[0]


def test_where_none_are_kept_it_is_said(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_kept(store)
    spec = tmp_path / "job.yaml"
    (tmp_path / "a.py").touch()
    spec.write_text(
        f"name: tiny\nscript: a.py\ncheckpoint:\n  tiers:\n    - {{kind: file, path: {tmp_path}/durable}}\n"
    )
    assert call_hp_ext("report", "-f", spec).code == 6
    log = KeptLog(store, 0)
    log.add([line("job_started", world_size=1, nodes=1, spares=0), step(1), line("job_ended", state="succeeded")])
    log.flush()
    for words in (["-f", str(spec)], [str(tmp_path / "durable" / "tiny")]):
        done = call_hp_ext("report", *words, "-o", "json")
        assert done.code == 0, done.stderr
        result = done.json
        assert (result["name"], result["state"], result["steps"]) == ("tiny", "succeeded", 1)


def test_a_spool_is_emptied_of_what_is_kept_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_EMPTIED_BYTES", 5)
    writer, reader = SpoolWriter(tmp_path / "s"), SpoolReader(tmp_path / "s")
    file = tmp_path / "s" / f"{os.getpid()}.jsonl"
    writer.write(b"one\ntwo\nthr")
    assert reader.read() == {os.getpid(): [b"one\n", b"two\n"]}
    writer.write(b"ee\n")
    assert reader.left
    reader.keep()
    assert file.stat().st_size == 14, "the third line has not been read"
    assert reader.read() == {os.getpid(): [b"three\n"]}
    reader.keep()
    assert file.stat().st_size == 0
    assert not reader.left
    writer.write(b"four\n")
    assert reader.read() == {os.getpid(): [b"four\n"]}
    writer.close()


def test_a_spool_that_nobody_takes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = SpoolWriter(tmp_path / "s"), SpoolReader(tmp_path / "s")
    writer.write(b"a line\n")
    reader.read()
    assert reader.shed() == 0
    monkeypatch.setattr(spool, "_MOST_BYTES", 5)
    assert reader.shed() == 7
    writer.write(b"b\n")
    assert reader.read() == {os.getpid(): [b"b\n"]}
    writer.close()


RANK = """\
import os, sys
from pathlib import Path
for each in sys.stdin:
    with open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a") as file:
        file.write(each)
    print(flush=True)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """A process that has spooled these lines, and waits."""
    (tmp_path / "s").mkdir()

    def started(*lines: bytes) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-S", "-c", RANK, str(tmp_path / "s")], bufsize=0, **pipes)  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        for each in lines:
            process.stdin.write(each)
            process.stdout.readline()
        return process  # type: ignore[no-any-return]

    return started


def test_a_rank_that_dies_without_a_word_is_a_fault_and_its_neighbour_is_none(
    rank: Callable[..., subprocess.Popen[bytes]], store: FileStore, tmp_path: Path
) -> None:
    ranks = [rank(line("joined", rank=number, pid=1), step(3, rank=number)) for number in (2, 3)]
    log = NodeEventLog(tmp_path / "s", lambda: store, lambda: 1)
    assert log.wait_kept(60)
    for each in ranks:
        each.kill()
        until(lambda: read_kept(store).events.of(Fault))
    for each in ranks:
        each.wait()
    (fault,) = read_kept(store).events.of(Fault)
    assert (fault.rank, fault.node, fault.step, fault.generation, fault.died) == (2, 1, 4, 1, True)
    assert (fault.kind, "SIGKILL" in fault.cause) == ("signal", True), "as the kernel shows it until we have waited"
    assert log.wait_kept(60)
    assert log.wait_kept(0)
    until(lambda: log.wait_kept(60) and not list((tmp_path / "s").iterdir()), "files of processes that ended are left")


@pytest.mark.parametrize("last", [{"event": "done", "digest": ""}, {"event": "stopped", "step": 1}], ids=str)
def test_the_end_of_a_rank_that_was_done_is_no_fault(
    last: dict[str, Any], rank: Callable[..., subprocess.Popen[bytes]], store: FileStore, tmp_path: Path
) -> None:
    process = rank(step(1), line(**last, rank=0))
    log = NodeEventLog(tmp_path / "s", lambda: store, lambda: 0)
    assert log.wait_kept(60)
    process.send_signal(signal.SIGTERM)
    process.wait()
    until(lambda: log.wait_kept(60) and log._processes[process.pid].handle < 0)
    assert read_kept(store).events.of(Fault) == []


def test_a_place_that_cannot_be_reached_costs_nothing_but_the_events(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = SpoolWriter(tmp_path / "s")
    put = store.put

    def refuses(*_: object, **__: object) -> None:
        raise UnreachableError("the place is full")

    monkeypatch.setattr(store, "put", refuses)
    log = NodeEventLog(tmp_path / "s", lambda: store, lambda: 0)
    writer.write(step(1))
    assert log.wait_kept(60)
    assert log.wait_kept(0), "nobody waits for what cannot be"
    assert "the place is full" in capsys.readouterr().err
    monkeypatch.setattr(store, "put", put)
    assert log.wait_kept(60)
    assert [event.step for event in read_kept(store).events.of(Step)] == [1]
    writer.close()
