"""Declared events: what may be written, what is read of other versions, and that every writer keeps to it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from made_events import entry

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.runtime.events import kinds
from hyperpod_ext.runtime.events.event import NOTE, VERSION, ByWorker, EventKinds, Other
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.events.log import _REPORTED, EventLog, append, checked
from hyperpod_ext.runtime.events.of_training import Go, Step
from hyperpod_ext.runtime.events.reading import read_events, read_log
from hyperpod_ext.runtime.ipc.declared import Count, Seconds, name_of
from hyperpod_ext.runtime.ipc.declared_table import in_line, table
from hyperpod_ext.runtime.ipc.messages import WireError

BY_NAME = {name_of(kind, "event"): kind for kind in KINDS}
GO = entry(1.0, "go", step=3)


def lines(*entries: dict[str, object]) -> list[str]:
    return [json.dumps(one) for one in entries]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "go: field `step` is missing"),
        ({"step": 3, "steps": 4}, "go: field `steps` is unknown"),
        ({"step": "3"}, "go: field `step` should be a valid integer, not '3'"),
        ({"step": -1}, "go: field `step` should be greater than or equal to 0, not -1"),
    ],
)
def test_an_event_that_is_not_as_declared_is_written_with_a_note_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], why: str
) -> None:
    _REPORTED.clear()
    log = EventLog(tmp_path, fresh=True)
    for _ in range(2):
        log.write("go", t=1.0, **fields)
    log.write(**GO)
    assert capsys.readouterr().err == f"hyperpod_ext: the event log has an event that is not as declared: {why}\n"
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert written[1] == {"t": 1.0, "event": "go", **fields, NOTE: why}
    found = read_events(tmp_path / "events.jsonl")
    assert found.all_events().of(Go) == [Go(t=1.0, step=3)]
    assert [other.why for other in found.events.of(Other)] == [why] * 2
    assert found.notes[0] == f"{tmp_path / 'events.jsonl'}:2: {why}; the event was left out"


def test_a_kind_that_nobody_declared_is_written_with_a_note_too() -> None:
    event, line = checked("gone", {"step": 1}, 2.0)
    assert (type(event), json.loads(line)[NOTE]) == (Other, "'gone' is no event")


def test_who_follows_the_log_gets_what_is_written(tmp_path: Path) -> None:
    log, heard = EventLog(tmp_path, fresh=True), list[object]()
    log.listeners.append(heard.append)
    log.write(**GO)
    assert heard == [Go(t=1.0, step=3)]


def test_numbers_that_a_script_logs_stand_beside_the_fields_of_a_step() -> None:
    (step,) = read_log(lines(entry(1.0, "step", loss=0.5, tokens=None)), "log").all_events().of(Step)
    assert step.logged == {"loss": 0.5, "tokens": None}
    assert isinstance(checked("step", {"rank": 0, "generation": 1, "step": 1, "began": 0.5, "loss": "nan"})[0], Other)


def test_a_log_begins_with_its_version_whoever_writes_it(tmp_path: Path) -> None:
    EventLog(tmp_path, fresh=True).close()
    EventLog(tmp_path, fresh=False).close()
    for _ in range(2):
        append(tmp_path / "events-rank0.jsonl", checked("go", {"step": 1})[1])
    for name, count in (("events.jsonl", 1), ("events-rank0.jsonl", 3)):
        written = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [one["event"] for one in written] == ["log", *["go"] * (count - 1)]
        assert written[0]["version"] == VERSION


def test_a_log_of_a_newer_version_is_refused_by_file_and_version() -> None:
    log = read_log(lines({"t": 0.5, "event": "log", "version": VERSION + 1}, GO), "run/events.jsonl")
    message = rf"run/events.jsonl:1: is of version {VERSION + 1} of the event log, .* reads up to {VERSION}"
    with pytest.raises(ConfigError, match=message):
        log.all_events()


def test_of_another_version_unknown_kinds_and_fields_are_left_out() -> None:
    log = read_log(lines(GO | {"since": 7}, {"t": 9.0, "event": "renamed_since", "rank": 1}), "log")
    assert log.all_events() == [Go(t=1.0, step=3), Other(t=9.0, name="renamed_since")]
    assert (log.events.end, log.notes) == (9.0, ())


def test_a_line_whose_field_is_wrong_is_damage_that_is_named() -> None:
    log = read_log(lines(GO, GO | {"step": "three"}, GO), "log")
    with pytest.raises(ConfigError, match=r"log:2: is not an event: go: field `step` should be a valid integer"):
        log.all_events()
    assert len(log.events) == 2


class Departed(ByWorker):
    """A kind that has another name than it had, and a field that has, too."""

    was = ("freed", "left")
    fields_were = {"step": "newest_step"}
    event: Literal["departed"] = "departed"
    newest_step: Count


@pytest.mark.parametrize("name", ["departed", "freed", "left"])
def test_former_names_are_read_and_never_written(name: str) -> None:
    renamed, now = EventKinds([Departed]), Departed(t=1.0, rank=2, newest_step=7)
    assert renamed.read({"t": 1.0, "event": name, "rank": 2, "step": 7}) == now
    assert renamed.read({"t": 1.0, "event": name, "rank": 2, "newest_step": 7}) == now
    with pytest.raises(WireError, match="departed: field `newest_step` is missing"):
        renamed.decode({"t": 1.0, "event": "departed", "rank": 2, "step": 7})


class Made(Step):
    """A kind that may have more fields, of which one has another name than it had."""

    fields_were = {"data_s": "load_s"}
    load_s: Seconds = 0.0


def test_a_former_name_of_a_field_is_no_number_that_a_script_logged() -> None:
    made = EventKinds([Made]).read(entry(2.0, "step", data_s=0.5, loss=1.0))
    assert isinstance(made, Made)
    assert (made.load_s, made.logged) == (0.5, {"loss": 1.0})


def test_no_name_is_that_of_two_kinds() -> None:
    names = [name for kind in KINDS for name in (name_of(kind, "event"), *kind.was)]
    assert len(names) == len(set(names))
    for kind in KINDS:
        assert set(kind.fields_were.values()) <= kind.model_fields.keys(), kind
        assert not set(kind.fields_were) & kind.model_fields.keys(), kind


# --- writers ----------------------------------------------------------------------------------------

WRITES = {"_log", "_event", "event", "Log", "_report", "write"}
"""Names of the functions whose first argument is the name of an event."""


def writers(root: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Place, event and fields of every call in the runtime that writes an event by name."""
    for file in sorted((root / "hyperpod_ext" / "runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                name = node.args[0].value
                if called in WRITES and isinstance(name, str) and (called != "_report" or name == "skipped"):
                    said = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    yield f"{file.relative_to(root)}:{node.lineno}", name, said


def test_every_event_that_the_code_writes_is_declared_and_so_are_its_fields(root: Path) -> None:
    written = set()
    for place, name, said in writers(root):
        if name.isidentifier():  # others are text that is written elsewhere
            assert name in BY_NAME, f"{place}: {name!r} is no declared event"
            unknown = said - BY_NAME[name].model_fields.keys()
            assert not unknown, f"{place}: {name} has no field {unknown}"
            written.add(name)
    assert written | {"log", "world"} >= BY_NAME.keys(), f"nobody writes {BY_NAME.keys() - written}"


def test_every_kind_says_what_it_means_and_who_writes_it() -> None:
    for kind in KINDS:
        assert kind.__doc__, kind
        assert kind.sender, kind


def test_the_page_has_every_kind_as_it_is_declared(golden_part: Callable[[str, str, str], None]) -> None:
    parts = []
    for module in kinds.THEMES:
        parts.append(f"{in_line(module.__doc__)}\n\n{table(EventKinds(kinds.declared_in(module)), 't', 'generation')}")
    golden_part("docs/events.md", "events", "\n".join(parts))
