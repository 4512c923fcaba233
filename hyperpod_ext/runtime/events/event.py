"""The base class of all events, and the decoding of log lines. The kinds of events are listed in `kinds.py`.

Writers pass a name and fields, and `decode` refuses undeclared fields. Readers are more lenient: `read` accepts former
names, drops unknown fields, and returns `Other` for an unknown kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

from hyperpod_ext.runtime.ipc import declared
from hyperpod_ext.runtime.ipc.declared import Count, Declared, Kinds, Unit
from hyperpod_ext.runtime.ipc.messages import WireError

VERSION = 3
"""Version of the event log. Increment it when readers of the previous version would misread a log."""
NOTE = "not_as_declared"
"""Field with the error message of an event that was written although its fields do not match the declaration."""


JobTime = Annotated[float, Unit("s")]
"""A time in seconds of the monotonic clock on the coordinator's machine."""


class Event(Declared):
    """Something that happened to a job."""

    reader = "event log"
    was: ClassVar[tuple[str, ...]] = ()
    """Names of this kind of event in logs of earlier versions."""
    fields_were: ClassVar[Mapping[str, str]] = {}
    """Present name of each field that had another name in logs of earlier versions."""

    t: JobTime
    """Time of the event, in seconds of the monotonic clock on the coordinator's machine."""
    generation: Count | None = None
    """The generation of the process that wrote the event."""


class ByCoordinator(Event):
    """An event written by the coordinator."""

    sender = "coordinator"


class ByAgent(Event):
    """An event written by a node's agent."""

    sender = "agent"
    node: Count
    """The node of the agent that wrote the event."""


class ByWorker(Event):
    """An event written by a rank's process."""

    sender = "worker"
    rank: Count
    """The rank whose process wrote the event."""


class Other(Event):
    """A log line that is not an event of a known kind."""

    name: str
    why: str = ""
    """The error in the line. Empty if its kind belongs to another version."""


E = TypeVar("E", bound=Event)


class Events(list[Event]):
    """Events in the order of their log, with an index by kind that is built once."""

    @cached_property
    def _by_kind(self) -> dict[type[Event], list[Any]]:
        found: dict[type[Event], list[Any]] = {}
        for event in self:
            found.setdefault(type(event), []).append(event)
        return found

    def of(self, kind: type[E]) -> list[E]:
        """Return all events of one kind."""
        return self._by_kind.get(kind, [])

    def first(self, kind: type[E]) -> E | None:
        return next(iter(self.of(kind)), None)

    def last(self, kind: type[E]) -> E | None:
        return next(reversed(self.of(kind)), None)

    @property
    def start(self) -> float:
        """Time of the first event; 0 without events."""
        return self[0].t if self else 0.0

    @cached_property
    def end(self) -> float:
        """Time of the last event; 0 without events."""
        return max((event.t for event in self), default=0.0)


class EventKinds(Kinds[Event]):
    """All declared kinds of events."""

    def __init__(self, kinds: Iterable[type[Event]]) -> None:
        known = list(kinds)
        super().__init__("event", "event", known)
        self._by_any_name = {name: kind for kind in known for name in (*kind.was, declared.name_of(kind, self.key))}

    def read(self, entry: Mapping[str, Any]) -> Event:
        """Return the event in a log line of this or an earlier version.

        Raises:
            WireError: a field is missing or wrong.
        """
        name = entry.get("event")
        kind = self._by_any_name.get(name) if isinstance(name, str) else None
        if kind is None or NOTE in entry:
            return declared.read(Other, {"t": entry.get("t"), "name": str(name), "why": str(entry.get(NOTE, ""))}, "t")
        fields = entry
        if kind.fields_were:
            fields = {kind.fields_were.get(field, field): value for field, value in entry.items()}
        try:
            return declared.read(kind, fields, str(name))  # nearly all lines are of this version
        except WireError:
            return declared.read(kind, _known(kind, fields), str(name))


def _known(kind: type[Event], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the fields that the kind declares."""
    if kind.model_config.get("extra") == "allow":
        return {name: value for name, value in fields.items() if name != "event"}
    return {name: value for name, value in fields.items() if name in kind.model_fields and name != "event"}
