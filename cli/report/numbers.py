"""Reads the numbers that `hp-ext top` shows from a job's target, from its pods, or from its stored events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..output import say

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
    from hyperpod_ext.jobs.pod_numbers import PodNumbers
    from hyperpod_ext.runtime.events.event import Event
    from hyperpod_ext.runtime.events.kept import KeptReader
    from hyperpod_ext.runtime.metrics.meters import Meters

    from ..checkpoints.location import CheckpointLocation

_POLL_S = 2.0


class Source(Protocol):
    """Interface of a source for the numbers of one job."""

    def take(self, update: StatusUpdate) -> Mapping[str, Any]:
        """Return the job's numbers after a status update, in the form of `runtime.metrics.summary`."""


class FromTarget:
    """Computes the numbers from events that the target reports, separately for a comparison run without faults."""

    def __init__(self) -> None:
        self._run = ""
        self._meters: Meters | None = None

    def take(self, update: StatusUpdate) -> Mapping[str, Any]:
        from hyperpod_ext.runtime.events.reading import read_followed
        from hyperpod_ext.runtime.metrics.meters import Meters
        from hyperpod_ext.runtime.metrics.summary import summary

        for entry in update.events:
            if self._meters is None or entry["run"] != self._run:
                self._run, self._meters = entry["run"], Meters()
            if (event := read_followed(entry)) is not None:
                self._meters.add(event)
        return summary(self._meters or Meters())


class FromPods:
    """Reads the numbers from the pod that serves metrics while the job runs, and otherwise from stored events."""

    def __init__(self, pods: PodNumbers, kept: FromPlaces) -> None:
        self._pods, self._kept = pods, kept
        self._warned = False

    def take(self, update: StatusUpdate) -> Mapping[str, Any]:
        if update.status.state == "running" and (found := self._pods.now()) is not None:
            return found
        found = self._kept.take(update)
        if self._pods.why and not self._kept.has_any and not self._warned:
            self._warned = True
            say(f"warning: no pod serves metrics ({self._pods.why}), and no events are stored next to checkpoints")
        return found


class FromPlaces:
    """Computes the numbers from the events that are stored next to the job's checkpoints, in the first of `places` that
    contains events."""

    def __init__(self, places: Sequence[CheckpointLocation]) -> None:
        from hyperpod_ext.runtime.events.kept import KeptReader

        self._readers: list[KeptReader] = [KeptReader(place.store) for place in places]
        self._events: list[Event] = []
        self._meters: Meters | None = None
        self._failed = ""

    @property
    def has_any(self) -> bool:
        return bool(self._events)

    @property
    def meters(self) -> Meters:
        from hyperpod_ext.runtime.metrics.meters import Meters

        return self._meters or Meters()

    def take(self, update: StatusUpdate | None = None) -> Mapping[str, Any]:
        from hyperpod_ext.runtime.metrics.summary import summary

        del update
        self._add(self._new())
        return summary(self.meters)

    def _new(self) -> list[Event]:
        from hyperpod_ext.errors import HyperpodExtError

        for reader in list(self._readers):
            try:
                new = reader.new()
            except HyperpodExtError as error:
                if error.message != self._failed:
                    self._failed = error.message
                    say(f"warning: {error.message}")
                continue
            if new:
                self._readers = [reader]  # from now on read only this place: all places contain the same events
                return new
        return []

    def _add(self, new: list[Event]) -> None:
        from hyperpod_ext.runtime.metrics.meters import Meters

        late = bool(new and self._events and new[0].t < self._events[-1].t)
        self._events = sorted([*self._events, *new], key=lambda event: event.t) if late else [*self._events, *new]
        if late or self._meters is None:
            self._meters, new = Meters(), self._events
        for event in new:
            self._meters.add(event)


def source_of(handle: JobHandle) -> Source:
    """Return the source for the numbers of a job.

    Raises:
        NotFoundError: the job does not exist.
    """
    from hyperpod_ext.jobs.pod_numbers import PodNumbers, spec_of

    from ..checkpoints.location import places_of

    if (job := spec_of(handle)) is None:
        return FromTarget()
    return FromPods(PodNumbers(handle, job), FromPlaces(places_of(job.checkpoint, job.name)))


def updates_of_place(place: CheckpointLocation) -> Iterator[dict[str, Any]]:
    """Yield the numbers of a job from its stored events, until it has ended.

    Raises:
        NotFoundError: no events of the job are stored.
    """
    import time

    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.job_status import FINAL_STATES, JobStatus

    from .runs import KEPT_BY

    kept = FromPlaces([place])
    while True:
        numbers = kept.take()
        if not kept.has_any:
            raise NotFoundError(f"no events are stored at {place.shown}", hint=KEPT_BY)
        name = place.shown.rstrip("/").rpartition("/")[2]
        yield job_numbers(JobStatus(name=name, handle=place.shown, state=str(numbers["state"])), numbers)
        if numbers["state"] in FINAL_STATES:
            return
        time.sleep(_POLL_S)


def job_numbers(status: JobStatus, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a job, merged with the job's status, as JSON."""
    merged = {"name": status.name, "handle": status.handle, **numbers}
    merged["state"] = status.state if status.ended or numbers["state"] != "recovering" else numbers["state"]
    merged["step"] = numbers["step"] if numbers["step"] is not None else status.step
    merged["of"] = numbers["of"] or status.of
    if status.ended:
        merged["left_s"] = None
    return merged
