"""What `hp-ext report` is given: the name or URL of a job, or files of a run that were copied from somewhere."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.errors import ConfigError
    from hyperpod_ext.runtime.events.reading import LogRead
    from hyperpod_ext.submit.contract.handle import JobHandle

    from ..checkpoints.location import CheckpointLocation

_NOT_COMPARED = {"loss_equal": None, "weights_equal": None, "undisturbed": None}
_REPORTS = ("result.json", "report.json")
_KEPT_BY = (
    "jobs that hyperpodrun or torchrun starts keep theirs in the first durable tier: name it with the job's name, "
    "as in s3://bucket/prefix/my-job"
)


def read_run(run: str) -> dict[str, Any]:
    """The result of a job, with every field that a report shows.

    Args:
        run: name or URL; or, with a slash or a suffix, a result.json, a report.json, an events.jsonl, or a folder that
            has one of them, in this order; or where a job's checkpoints lie.

    Raises:
        NotFoundError: there is no such job or file, or the job has not ended.
        ConfigError: a file cannot be read as what it should be.
    """
    return _completed(run, _read(run))


def _completed(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    from hyperpod_ext.submit.local.result import EMPTY_REPORT

    return EMPTY_REPORT | {"name": name, "faults": []} | _NOT_COMPARED | dict(result)


def compare(result: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """The result with what another run came to, and whether both had the same losses and weights."""
    from hyperpod_ext.submit.local.result import same

    other = {key: undisturbed[key] for key in ("name", "state", "steps", "goodput", "losses")}
    other["seconds"] = undisturbed["seconds"].get("wall")
    equal = {"loss_equal": same(result, undisturbed, "losses"), "weights_equal": same(result, undisturbed, "weights")}
    return {**result, **equal, "undisturbed": other}


def read_kept_run(file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The result of the job of a spec, from the events beside its checkpoints.

    Raises:
        NotFoundError: none of its durable tiers has any.
        ConfigError: the spec or the events cannot be read.
    """
    from hyperpod_ext.errors import NotFoundError

    from ..checkpoints.location import durable_places

    places = durable_places(None, file, overrides)
    for place in places:
        with contextlib.suppress(NotFoundError):
            return _completed(place.job or "", _of_kept(place))
    tried = " or ".join(place.shown for place in places)
    raise NotFoundError(f"no events are kept in {tried}", hint=_KEPT_BY)


def _of_kept(place: CheckpointLocation) -> Mapping[str, Any]:
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.runtime.events.kept import read_kept

    try:
        log = read_kept(place.store)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=_KEPT_BY) from None
    return {"name": place.shown.rstrip("/").rpartition("/")[2], **_of_log(log, place.shown)}


def _read(run: str) -> Mapping[str, Any]:
    if run.startswith(("s3://", "file://")) or ("/" in run and (Path(run) / "events").is_dir()):
        from ..checkpoints.location import open_place

        return _of_kept(open_place(run))
    if "://" not in run and ("/" in run or run.endswith((".json", ".jsonl"))):
        return _read_file(Path(run))
    from hyperpod_ext.submit.contract.handle import JobHandle

    return read_result(JobHandle.parse(run))


def read_result(handle: JobHandle) -> dict[str, Any]:
    """The result of a job. Where its agents could write no report, as when all were killed, its figures come from its
    event log.

    Raises:
        NotFoundError: there is no such job, or it has neither ended nor begun.
    """
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.submit.contract.targets import get_target

    target = get_target(handle.target)
    status = target.status(handle)
    events = Path(status.folder) / "main" / "events.jsonl" if status.folder else None
    try:
        result = dict(target.result(handle))
    except NotFoundError:
        if events is None or not events.exists():
            raise
        return dict(_read_file(events)) | {"name": handle.name, "state": status.state}
    if result.get("world_size") or events is None or not events.exists():
        return result
    own = {key: result[key] for key in ("name", "target", "handle", "state", "error", *_NOT_COMPARED) if key in result}
    return dict(_read_file(events)) | own


def _read_file(path: Path) -> Mapping[str, Any]:
    from hyperpod_ext.errors import NotFoundError

    if path.is_dir():
        found = [path / name for name in (*_REPORTS, "events.jsonl") if (path / name).is_file()]
        if not found:
            hint = "name a run folder, as of `HPX_RUN_DIR`, or one of these files"
            raise NotFoundError(f"{path} has no {', '.join(_REPORTS)} or events.jsonl", hint=hint)
        path = found[0]
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}", hint="a job is named without a slash or suffix") from None
    if path.suffix == ".jsonl":
        return _of_events(path, text)
    try:
        report = json.loads(text)
    except ValueError:
        raise _damaged(path, "is no JSON", "it was cut off; name the events.jsonl beside it") from None
    if not isinstance(report, dict) or not {"state", "recoveries", "seconds"} <= report.keys():
        raise _damaged(path, "is not the report of a run", "name a report.json or result.json of ours")
    return {"name": path.resolve().parent.name, **report}


def _of_events(path: Path, text: str) -> Mapping[str, Any]:
    """A report made here and now: of a job that could not write one, or still runs."""
    from hyperpod_ext.runtime.events.reading import read_log

    return {"name": path.resolve().parent.name, **_of_log(read_log(text.splitlines(), str(path)), str(path))}


def _of_log(log: LogRead, source: str) -> dict[str, Any]:
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.events.of_training import JobEnded, JobStarted, Joined
    from hyperpod_ext.runtime.events.report import make_report

    from ..output import say

    events = Events(sorted(log.all_events(), key=lambda event: event.t))
    if not events:
        raise _damaged(source, "holds no event", "the job has not begun, or another file is meant")
    for note in log.notes:
        say(f"warning: {note}")
    started, ended = events.first(JobStarted), events.last(JobEnded)
    ranks = started.world_size if started is not None else len({event.rank for event in events.of(Joined)})
    return make_report(events, state=ended.state if ended else "unfinished", error=None, world_size=ranks)


def _damaged(path: Path | str, message: str, hint: str) -> ConfigError:
    from hyperpod_ext.errors import ConfigError, Problem

    return ConfigError([Problem(message, source=str(path), hint=hint)])
