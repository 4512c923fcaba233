"""The event log of a job whose disk was full, or whose coordinator was killed as it wrote."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path

import pytest
from made_events import entry
from small_disk import fill, mounted

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.events.capacity import orders_accepted
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.log import EventLog, report_on, write_report
from hyperpod_ext.runtime.events.reading import read_events
from hyperpod_ext.runtime.ipc.declared import name_of

HALF = '{"t": 3.0, "event": "st'


def log_of(folder: Path, *events: str, tail: str = "") -> Path:
    log = EventLog(folder, fresh=True)
    for event in events:
        log.write(**entry(1.0, event))
    log.close()
    file = folder / "events.jsonl"
    with file.open("a") as opened:
        opened.write(tail)
    return file


def names(events: Events) -> list[str]:
    return [name_of(type(event), "event") for event in events]


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log_of(tmp_path, "job_started", "go", tail=HALF)
    log = read_events(file)
    assert (names(log.all_events()), capsys.readouterr().err) == (["job_started", "go"], "")
    assert log.notes == (f"{file}:4: the last line is cut off; it was left out",)


@pytest.mark.parametrize("half", [HALF, '{"t": 3.0, "event": "' + "x" * 200_000, HALF.replace("{", "\n{")])
def test_another_coordinator_begins_a_line_of_its_own(tmp_path: Path, half: str) -> None:
    file = log_of(tmp_path, "job_started", "go", tail=half)
    log = EventLog(tmp_path, fresh=False)
    log.write(**entry(1.0, "coordinator", term=2))
    assert names(log.read()) == ["job_started", "go", "coordinator"]
    assert file.read_bytes().endswith(b"\n")


def test_a_log_of_half_a_line_is_begun_anew(tmp_path: Path) -> None:
    log_of(tmp_path, tail=HALF)
    log = EventLog(tmp_path, fresh=False)
    log.write(**entry(1.0, "coordinator"))
    assert names(log.read()) == ["coordinator"]


def test_a_full_disk_loses_events_says_so_and_leaves_no_half_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path, fresh=True)
    log.write(**entry(1.0, "job_started"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "events.jsonl").stat().st_size + 10, hard))
    try:
        for _ in range(3):
            log.write(**entry(1.0, "go"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("events are lost: File too large") == 1
    log.write(**entry(1.0, "step"))
    assert names(log.read()) == ["job_started", "step"]
    assert "3 events could not be written here: File too large" in (tmp_path / "events.jsonl").read_text()
    report = report_on(tmp_path / "events.jsonl", state="succeeded", error=None, world_size=1)
    assert (report["state"], report["error"]) == ("succeeded", None)
    assert "events.jsonl: 3 events could not be written: File too large" in report["warnings"][0]


def test_a_damaged_line_is_named_and_the_job_ends_as_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def job() -> None:
        coordinator = Coordinator.first(RuntimeConfig(name="a", nodes=1, workers_per_node=1), 0, tmp_path, 1)
        with (tmp_path / "events.jsonl").open("a") as log:
            log.write(HALF + "\n")
            log.write(json.dumps(entry(4.0, "resized", order="7")) + "\n")
        assert orders_accepted(coordinator.events.read(steps=False)) == {"7"}
        coordinator.cancel()
        assert await coordinator.ended == "cancelled"
        await coordinator.close()

    asyncio.run(job())
    place = f"{tmp_path / 'events.jsonl'}:3: is not an event"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["state"] == "cancelled"
    assert place in report["error"]["message"]
    assert place in capsys.readouterr().err


def test_events_that_are_written_together_are_in_the_file_when_it_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path, fresh=True)
    with log.together():
        log.write(**entry(1.0, "go"))
        log.write(**entry(2.0, "go"))
        assert len(log.read()) == 2
        log.write(**entry(3.0, "go"))
    log.write(**entry(4.0, "go"))
    log.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["t"] for line in lines[1:]] == [1.0, 2.0, 3.0, 4.0]


def test_another_coordinator_begins_where_nothing_can_be_written_and_the_log_when_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place that all nodes share may be gone for a moment, or take no new file."""
    folder = tmp_path / "gone"
    log = EventLog(folder, fresh=False)
    log.write(**entry(1.0, "coordinator", term=2))
    assert (names(log.read()), list(log.past())) == ([], [])
    said = capsys.readouterr().err
    assert f"{folder / 'events.jsonl'} cannot be written, events are lost: No such file or directory" in said
    folder.mkdir()
    log.write(**entry(2.0, "go"))
    log.write(**entry(3.0, "go"))
    first, lost, *events = (folder / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["event"] == "log"
    assert lost == "1 events could not be written here: No such file or directory"
    assert [json.loads(line)["t"] for line in events] == [2.0, 3.0]
    report = log.reporter(state="failed", error=None, world_size=1)()
    assert "events.jsonl: 1 events could not be written: No such file" in report["warnings"][0]
    log.close()


def test_a_log_that_somebody_removes_is_in_the_report_all_the_same(tmp_path: Path) -> None:
    log = EventLog(tmp_path, fresh=True)
    log.write(**entry(1.0, "job_started"))
    log.write(**entry(2.0, "generation"))
    whole = log.reporter(state="succeeded", error=None, world_size=1)()
    log.path.unlink()
    report = log.reporter(state="succeeded", error=None, world_size=1)()
    assert report == whole | {"warnings": [f"{log.path} was removed while the job ran"]}
    assert report["seconds"]["wall"] > 0
    log.close()


def test_events_that_are_lost_when_a_job_ends_are_in_its_report(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "256k") as disk:
        log = EventLog(disk, fresh=True)
        log.write(**entry(1.0, "job_started"))
        fill(disk)
        for _ in range(200):
            log.write(**entry(1.0, "step"))
        report = log.reporter(state="succeeded", error=None, world_size=1)()
        lost = 201 - len(log.read())
        assert lost > 100
        assert f"{disk}/events.jsonl: {lost} events could not be written: No space" in report["warnings"][0]
        write_report(disk, report)
        assert json.loads((disk / "report.json").read_text()) == report
        log.close()


def test_a_report_that_is_too_long_for_a_full_disk_is_written_without_its_numbers(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "256k") as disk:
        log = EventLog(disk, fresh=True)
        report = log.reporter(state="failed", error={"message": "why"}, world_size=1)()
        fill(disk)
        write_report(disk, report | {"losses": {str(step): 0.5 for step in range(10_000)}})
        written = json.loads((disk / "report.json").read_text())
        assert (written["state"], written["error"], written["losses"]) == ("failed", {"message": "why"}, {})
        assert "report.json: the report has no numbers" in written["warnings"][0]
        assert sorted(path.name for path in disk.iterdir()) == ["events.jsonl", "others", "report.json"]
        log.close()


def test_a_full_disk_that_takes_no_first_line_costs_no_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path, fresh=False)
    log.write(**entry(1.0, "coordinator", term=2))
    log.close()
    assert "cannot be written, events are lost: No space left on device" in capsys.readouterr().err


def test_a_job_does_not_begin_where_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventLog(tmp_path / "gone", fresh=True)
