"""Reads the run that the user names for `hp-ext report`: a job by its name or URL, or files of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.errors import ConfigError
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.job_status import JobStatus
    from hyperpod_ext.runtime.events.history import JobHistory
    from hyperpod_ext.runtime.events.reading import LogRead

    from ..checkpoints.location import CheckpointLocation

_LONG_BYTES = 64 << 20
"""Size of an event log in bytes above which progress is shown, because reading takes several seconds."""
_OWN = (
    *("name", "target", "handle", "state", "error", "starts", "slurm_job_id"),
    *("loss_equal", "weights_equal", "undisturbed"),
)
"""Fields of a result that come from the target and not from the event log."""
_REPORTS = ("result.json", "report.json")
KEPT_BY = (
    "jobs on Kubernetes, SageMaker and torchrun store their events in the first durable tier: write the tier's URL "
    "with the job's name, for example s3://bucket/prefix/my-job"
)


def read_run(run: str) -> dict[str, Any]:
    """Return the result of a job, with every field that a report shows.

    Args:
        run: name or URL of a job, or a job's checkpoint folder, or a path that contains a slash or ends in
            .json or .jsonl. A path names a result.json, a report.json, an events.jsonl, or a folder that contains one
            of these files.

    Raises:
        NotFoundError: the job or the file does not exist, or the job has not ended.
        ConfigError: a file cannot be read, or is invalid.
    """
    return _completed(run, _read(run))


def _completed(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    from hyperpod_ext.jobs.local.result import EMPTY_REPORT

    return EMPTY_REPORT | {"name": name, "faults": []} | dict(result)


def compare(result: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `result` with a comparison: the result of the run without faults, and whether the losses and the weights
    of the two runs are equal."""
    from hyperpod_ext.jobs.local.result import same

    other = {key: undisturbed[key] for key in ("name", "state", "steps", "goodput", "losses")}
    other["seconds"] = undisturbed["seconds"].get("wall")
    equal = {"loss_equal": same(result, undisturbed, "losses"), "weights_equal": same(result, undisturbed, "weights")}
    return {**result, **equal, "undisturbed": other}


def read_kept_run(file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the result of the job that the spec `file` describes, from the events next to the job's checkpoints.

    Raises:
        NotFoundError: none of the job's durable tiers contains events.
        ConfigError: the spec or the events cannot be read.
    """
    from hyperpod_ext.errors import NotFoundError

    from ..checkpoints.location import durable_places

    places = durable_places(None, file, overrides)
    for place in places:
        with contextlib.suppress(NotFoundError):
            return _completed(place.job or "", _of_kept(place))
    tried = " or ".join(place.shown for place in places)
    raise NotFoundError(f"no events are stored in {tried}", hint=KEPT_BY)


def _of_kept(place: CheckpointLocation) -> Mapping[str, Any]:
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.runtime.events.kept import read_kept

    try:
        log = read_kept(place.store)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=KEPT_BY) from None
    return {"name": place.shown.rstrip("/").rpartition("/")[2], **_of_log(log, place.shown)}


def place_of_events(text: str) -> CheckpointLocation | None:
    """Return the checkpoint folder with stored events that `text` names; None if `text` does not name such a folder."""
    if text.startswith(("s3://", "file://")) or ("/" in text and (Path(text) / "events").is_dir()):
        from ..checkpoints.location import open_place

        return open_place(text)
    return None


def _read(run: str) -> Mapping[str, Any]:
    from hyperpod_ext.errors import NotFoundError

    if (place := place_of_events(run)) is not None:
        return _of_kept(place)
    if "://" not in run and run.endswith((".yaml", ".yml")):
        raise _damaged(run, "is a spec, not a run", "write the job's name or URL, or the folder of its checkpoints")
    if "://" not in run and ("/" in run or run.endswith((".json", ".jsonl"))):
        return _read_file(Path(run))
    from hyperpod_ext.jobs.contract.handle import JobHandle

    handle = JobHandle.parse(run)
    try:
        return read_result(handle)
    except NotFoundError as error:
        if not Path(run).is_dir():
            raise
        raise NotFoundError(error.message, hint=f"{error.hint}; to read the folder, write ./{run}") from None


def read_result(handle: JobHandle) -> dict[str, Any]:
    """Return the result of a job. If the job has no report, for example because all agents were killed, the figures are
    computed from its event log.

    Raises:
        NotFoundError: the job does not exist, or has not begun.
    """
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.targets import get_target

    from ..job_events import events_in

    target = get_target(handle.target)
    status = target.status(handle)
    events = events_in(status.folder)
    try:
        result = dict(target.result(handle))
    except NotFoundError:
        if (logged := _logged(handle, events)) is None:
            raise
        return {**logged, "name": handle.name, "state": status.state}
    if result.get("world_size") or (logged := _logged(handle, events)) is None:
        return result
    own = {key: result[key] for key in _OWN if key in result}
    if result.get("losses"):  # unlike `logged`, `result` has the losses of all starts of the job
        own["losses"] = result["losses"]
    if "error" in own:
        own["error"] = _first_cause(handle, own["error"], logged["error"])
    warnings = dict.fromkeys([*result.get("warnings", ()), *logged["warnings"]])
    return {**logged, **own, "warnings": [*warnings]}


def why_failed(handle: JobHandle, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the error of a job as `hp-ext report` and `hp-ext wait` show it; None if there is none.

    Args:
        status: the job's JobStatus as JSON.
    """
    error: dict[str, Any] | None = status["error"]
    if status["state"] != "failed" or handle.target == "local":  # the status of a local job has the full error
        return error
    found: dict[str, Any] | None = read_result(handle)["error"]
    return found


def _first_cause(
    handle: JobHandle, seen: dict[str, Any] | None, logged: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the scheduler's error, with the cause from the event log in front of the message."""
    if not seen or not logged or handle.target == "local" or logged["message"] in seen["message"]:
        return seen
    return {**seen, "message": f"{logged['message']}. Then: {seen['message']}"}


def _logged(handle: JobHandle, events: Path | None) -> Mapping[str, Any] | None:
    """Return the result of a job from its events, on this machine or next to its checkpoints. None if there are no
    events."""
    from hyperpod_ext.errors import NotFoundError, UnreachableError
    from hyperpod_ext.jobs.pod_numbers import spec_of

    from ..checkpoints.location import places_of
    from ..output import say

    if events is not None:
        return _read_file(events)
    job = spec_of(handle)
    for place in places_of(job.checkpoint, job.name) if job is not None else ():
        try:
            return _of_kept(place)
        except NotFoundError:
            pass
        except UnreachableError as error:
            say(f"warning: the job's events cannot be read: {error.message}")
    return None


def read_run_history(text: str) -> JobHistory:
    """Return the failures and the step times of a run, for the planner.

    Raises:
        NotFoundError: there are no events of the run.
        ConfigError: the events cannot be read, or are too few.
    """
    from hyperpod_ext.runtime.events.history import history_of, read_history
    from hyperpod_ext.runtime.events.kept import read_kept

    if (place := place_of_events(text)) is None:
        return read_history(Path(text))
    log = read_kept(place.store)
    return history_of(log.all_events(), place.shown, log.notes)


def list_kept(url: str) -> list[JobStatus]:
    """Return the jobs whose events are stored below the URL of a durable tier, sorted by name.

    Raises:
        NotFoundError: no job has events below `url`.
    """
    from datetime import UTC, datetime

    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.job_status import FINAL_STATES, JobStatus
    from hyperpod_ext.runtime.events.kept import read_kept
    from hyperpod_ext.runtime.metrics.meters import Meters

    from ..checkpoints.location import open_place

    above, found = open_place(url), []
    for name in above.store.folders():
        place = open_place(f"{above.shown.rstrip('/')}/{name}")
        try:
            events = read_kept(place.store).events
        except NotFoundError:
            continue
        if not events:  # no events: the file belongs to another program, or all lines of the file are damaged
            continue
        meters = Meters()
        for event in events:
            meters.add(event)
        began, last = (
            datetime.fromtimestamp(event.t, UTC).isoformat(timespec="seconds") for event in (events[0], events[-1])
        )
        ended = last if meters.state in FINAL_STATES else None
        found.append(JobStatus(name, place.shown, meters.state, meters.step, meters.of, began, ended))
    if not found:
        raise NotFoundError(f"no job has events below {above.shown}", hint=KEPT_BY)
    return found


def _read_file(path: Path) -> Mapping[str, Any]:
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.job_files.job_report import ReportOutput
    from hyperpod_ext.jobs.job_files.json_files import read_checked

    if path.is_dir():
        found = [path / name for name in (*_REPORTS, "events.jsonl") if (path / name).is_file()]
        if not found:
            hint = "give the path of a run folder (the value of HPX_RUN_DIR in the job), or of one of these files"
            raise NotFoundError(f"{path} has no {', '.join(_REPORTS)} or events.jsonl", hint=hint)
        path = found[0]
    if path.suffix == ".jsonl" and path.is_file():
        return _of_events(path)
    hint = "name a report.json or result.json of hp-ext, or the events.jsonl next to it"
    try:
        report = read_checked(path, ReportOutput, hint)
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no file {path}", hint="if you mean a job, write only its name, without a folder or a suffix"
        ) from None
    return {"name": path.resolve().parent.name, **report}


def _of_events(path: Path) -> Mapping[str, Any]:
    """Return a report that is computed from the event log of a job, because the job has no report or still runs."""
    from hyperpod_ext.files import open_regular
    from hyperpod_ext.runtime.events.reading import complete_lines, read_log

    from ..checkpoints.progress import transfer

    nbytes = path.stat().st_size
    shown = transfer(f"reading {path.name}", nbytes) if nbytes > _LONG_BYTES else contextlib.nullcontext(_not_counted)
    with open_regular(path) as file, shown as count:
        log = read_log(_counted(complete_lines(file), count), str(path))
    return {"name": path.resolve().parent.name, **_of_log(log, str(path))}


def _counted(lines: Iterable[bytes], count: Callable[[int], None]) -> Iterator[str]:
    """Yield the lines as text. After each mebibyte, call `count` with the number of bytes that were read since the last
    call."""
    read = 0
    for line in lines:
        yield line.decode(errors="replace")
        read += len(line)
        if read >= 1 << 20:
            count(read)
            read = 0


def _not_counted(nbytes: int) -> None: ...


def _of_log(log: LogRead, source: str) -> dict[str, Any]:
    from hyperpod_ext.runtime.events.of_training import JobEnded, JobStarted, Joined
    from hyperpod_ext.runtime.events.report import make_report

    from ..job_events import in_time
    from ..output import say
    from .last_fault import last_fault

    events = in_time(log)
    if not events:
        raise _damaged(source, "contains no event", "wait until the job has begun, or name the job's events.jsonl")
    for note in log.notes:
        say(f"warning: {note}")
    started, ended, hit = events.first(JobStarted), events.last(JobEnded), last_fault(events)
    error = None
    if hit is not None and not hit.recovered and (ended is None or ended.state == "failed"):
        error = {"code": "JobFailedError", "message": hit.sentence, "hint": "the logs of the ranks have more details"}
    ranks = started.world_size if started is not None else len({event.rank for event in events.of(Joined)})
    return make_report(events, state=ended.state if ended else "unfinished", error=error, world_size=ranks)


def _damaged(path: Path | str, message: str, hint: str) -> ConfigError:
    from hyperpod_ext.errors import ConfigError, Problem

    return ConfigError([Problem(message, source=str(path), hint=hint)])
