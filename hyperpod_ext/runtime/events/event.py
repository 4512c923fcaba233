"""The base class of all events, and the parsing of log lines. `kinds.py` lists the kinds of events.

When an event is written, `decode` makes it from its name and fields, and raises an error for undeclared fields. Reading
event lines is more lenient: `read` accepts names of earlier versions, drops unknown fields, and returns `Other` for an
unknown kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

from hyperpod_ext.runtime.ipc import declared
from hyperpod_ext.runtime.ipc.declared import Count, Declared, Kinds, Unit
from hyperpod_ext.runtime.ipc.messages import WireError

VERSION = 3
"""Version of the event log's format, to increment when readers of the previous version would misread a log."""
NOTE = "not_as_declared"
"""Field in the line of an event whose fields do not match its declaration. The field's value is the error message."""


JobTime = Annotated[float, Unit("s")]
"""Time in seconds of the monotonic clock on the coordinator's machine."""


class Event(Declared):
    """Base class of events. An event is something that happened to a job, as one line of the event log."""

    reader = "event log"
    was: ClassVar[tuple[str, ...]] = ()
    """Names of this kind of event in logs of earlier versions."""
    fields_were: ClassVar[Mapping[str, str]] = {}
    """Present name of each field that has another name in logs of earlier versions."""

    t: JobTime
    """Time of the event, in seconds of the monotonic clock on the coordinator's machine."""
    generation: Count | None = None
    """Number of the generation of the process that wrote the event."""


class ByCoordinator(Event):
    """Base class of events that the coordinator writes."""

    sender = "coordinator"


class ByAgent(Event):
    """Base class of events that a node's agent writes."""

    sender = "agent"
    node: Count
    """Number of the node whose agent wrote the event."""


class ByWorker(Event):
    """Base class of events that a worker (the process of a rank) writes."""

    sender = "worker"
    rank: Count
    """The rank whose process wrote the event."""


class Other(Event):
    """A log line of an unknown kind, or with wrong fields."""

    name: str
    why: str = ""
    """Error message about the line's fields. The message is empty if only the kind is unknown, because another version
    wrote the line."""


E = TypeVar("E", bound=Event)


class Events(list[Event]):
    """Events in the order of their log. An index of the events by kind is built on first use."""

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
        """Time of the first event, in seconds; 0 if there are no events."""
        return self[0].t if self else 0.0

    @cached_property
    def end(self) -> float:
        """Time of the last event, in seconds; 0 if there are no events."""
        return max((event.t for event in self), default=0.0)


class EventKinds(Kinds[Event]):
    """The set of all declared kinds of events."""

    def __init__(self, kinds: Iterable[type[Event]]) -> None:
        known = list(kinds)
        super().__init__("event", "event", known)
        self._by_any_name = {name: kind for kind in known for name in (*kind.was, declared.name_of(kind, self.key))}

    def read(self, entry: Mapping[str, Any]) -> Event:
        """Parse the event in a log line that this version or an earlier version wrote.

        Raises:
            WireError: a field is missing or has a wrong value.
        """
        name = entry.get("event")
        kind = self._by_any_name.get(name) if isinstance(name, str) else None
        if kind is None or NOTE in entry:
            return declared.read(Other, {"t": entry.get("t"), "name": str(name), "why": str(entry.get(NOTE, ""))}, "t")
        fields = entry
        if kind.fields_were:
            fields = {kind.fields_were.get(field, field): value for field, value in entry.items()}
        try:
            return declared.read(kind, fields, str(name))  # try this version's format first: most lines have it
        except WireError:
            return declared.read(kind, _known(kind, fields), str(name))


def _known(kind: type[Event], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return only those fields that the kind declares."""
    if kind.model_config.get("extra") == "allow":
        return {name: value for name, value in fields.items() if name != "event"}
    return {name: value for name, value in fields.items() if name in kind.model_fields and name != "event"}
