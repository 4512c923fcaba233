"""Events beside the checkpoints: what processes spool, what a node's memory server makes of it, what is read again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from waiting import until

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.metrics import Metrics
from hyperpod_ext.errors import NotFoundError, UnreachableError
from hyperpod_ext.runtime.events import kept, spool
from hyperpod_ext.runtime.events.kept import KeptLog, LogUpload, read_kept
from hyperpod_ext.runtime.events.log import EventLog, checked
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.events.of_training import Go, JobEnded, JobStarted, MetricsShown, Step
from hyperpod_ext.runtime.events.spool import SpoolReader, SpoolWriter
from hyperpod_ext.runtime.memory_server.event_log import NodeEventLog
from hyperpod_ext.runtime.memory_server.node_numbers import NodeNumbers
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.storage.file import FileStore


def line(event: str, **fields: Any) -> bytes:
    return checked(event, {"generation": 1, **fields})[1]


def step(number: int, rank: int = 0) -> bytes:
    return line("step", rank=rank, step=number, began=time.monotonic() - 0.5, loss=1.0 / number)


def test_a_full_disk_costs_a_process_lines_and_never_half_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, before = SpoolWriter(tmp_path / "s"), resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.write(b"1\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        for _ in range(3):
            writer.write(b"2" * 20 + b"\n")
        writer.write(b"3\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert SpoolReader(tmp_path / "s").read() == {os.getpid(): [b"1\n", b"3\n"]}
    writer.close()
    (tmp_path / "file").touch()
    writer = SpoolWriter(tmp_path / "file")
    writer.write(b"1\n")
    writer.close()
    assert capsys.readouterr().err.count("cannot be written, events are lost: File exists") == 1


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


def test_where_none_are_kept_it_is_own_events(store: FileStore, tmp_path: Path) -> None:
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
    log = NodeEventLog(tmp_path / "s", store, lambda: 1)
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


def test_of_several_that_ended_the_first_is_the_fault(
    rank: Callable[..., subprocess.Popen[bytes]], store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends a node's other processes milliseconds later, maybe before anything of them has been read."""
    ranks = [rank(line("joined", rank=number, pid=1), step(3, rank=number)) for number in range(4)]
    read, goes_on = SpoolReader.read, threading.Event()

    def held(spooled: SpoolReader) -> dict[int, list[bytes]]:
        assert goes_on.wait(60)
        return read(spooled)

    monkeypatch.setattr(SpoolReader, "read", held)
    log = NodeEventLog(tmp_path / "s", store, lambda: 0)
    for each in ranks:
        log.watch(each.pid)
    for number in (2, 3, 0, 1):
        ranks[number].kill()
        ranks[number].wait()
    goes_on.set()
    until(lambda: store.list("events/") and read_kept(store).events.of(Fault))
    assert [fault.rank for fault in read_kept(store).events.of(Fault)] == [2]


@pytest.mark.parametrize("last", [{"event": "done", "digest": ""}, {"event": "stopped", "step": 1}], ids=str)
def test_the_end_of_a_rank_that_was_done_is_no_fault(
    last: dict[str, Any], rank: Callable[..., subprocess.Popen[bytes]], store: FileStore, tmp_path: Path
) -> None:
    process = rank(step(1), line(**last, rank=0))
    log = NodeEventLog(tmp_path / "s", store, lambda: 0)
    assert log.wait_kept(60)
    process.send_signal(signal.SIGTERM)
    process.wait()
    until(lambda: log.wait_kept(60) and log._processes[process.pid].handle < 0)
    assert read_kept(store).events.of(Fault) == []


def test_node_0_shows_the_numbers_of_all_nodes(store: FileStore, tmp_path: Path) -> None:
    """By events of its own ranks, and by what another node tells it over TCP."""
    config = RuntimeConfig(name="tiny", nodes=2, workers_per_node=1, metrics=Metrics(port=0, host="127.0.0.1"))
    none = Regions(kind="own", job="tiny", secret=b"s", budget=Budget(1, lambda: 1), slots=2)
    peers = PeerServer(none, none, Plans(), secret=b"s", job="tiny", cpu_priority=CpuPriority(1.0), host="127.0.0.1")
    logs, writers = [], []
    for node in (0, 1):
        writers.append(SpoolWriter(tmp_path / f"s{node}"))
        numbers = NodeNumbers(config, store if node == 0 else None, b"s")
        logs.append(NodeEventLog(tmp_path / f"s{node}", store if node == 0 else None, lambda node=node: node, numbers))
    peers.on_events = logs[0].receive
    peers.start()
    for log in logs:
        log.enter(("127.0.0.1", peers.port))
    writers[0].write(line("job_started", world_size=2, nodes=2, spares=0))
    for rank, writer in enumerate(writers):
        writer.write(step(7, rank=rank))
    until(lambda: logs[0].wait_kept(60) and read_kept(store).events.of(MetricsShown))
    port = read_kept(store).events.of(MetricsShown)[0].port

    def shown() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    until(lambda: 'hpx_step_seconds_count{hpx_job="tiny"} 2' in shown(), lambda: shown())
    assert 'hpx_step{hpx_job="tiny"} 7' in shown()
    assert 'hpx_world_size{hpx_job="tiny"} 2' in shown()
    peers.close()
    for writer in writers:
        writer.close()


def test_a_place_that_cannot_be_reached_costs_nothing_but_the_events(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = SpoolWriter(tmp_path / "s")
    put = store.put

    def refuses(*_: object, **__: object) -> None:
        raise UnreachableError("the place is full")

    monkeypatch.setattr(store, "put", refuses)
    log = NodeEventLog(tmp_path / "s", store, lambda: 0)
    writer.write(step(1))
    assert log.wait_kept(60)
    assert log.wait_kept(0), "nobody waits for what cannot be"
    assert "the place is full" in capsys.readouterr().err
    monkeypatch.setattr(store, "put", put)
    assert log.wait_kept(60)
    assert [event.step for event in read_kept(store).events.of(Step)] == [1]
    writer.close()


def test_what_a_coordinator_writes_is_kept_beside_its_own_log(store: FileStore, tmp_path: Path) -> None:
    log = EventLog(tmp_path, fresh=True)
    log.write("job_started", world_size=1, nodes=1, spares=0)
    upload = LogUpload(log.path, lambda: store, 0)
    log.write("go", generation=1, step=0)  # what people wait for goes at once
    until(lambda: store.list("events/") and len(read_kept(store).events) == 2)
    log.write("step", generation=1, rank=0, step=1, began=time.monotonic(), loss=1.0)
    log.write("job_ended", state="succeeded")
    upload.close()
    found = read_kept(store)
    assert found.damaged is None
    assert [type(event) for event in found.events] == [JobStarted, Go, Step, JobEnded]
    assert abs(found.events[0].t - time.time()) < 3600


def test_a_coordinator_whose_place_cannot_be_reached_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> FileStore:
        raise UnreachableError("there is no bucket of this name")

    log = EventLog(tmp_path, fresh=True)
    upload = LogUpload(log.path, away, 0)
    log.write("job_ended", state="succeeded")
    upload.close()
    assert capsys.readouterr().err.count("the job's events are not kept: there is no bucket of this name") == 1
