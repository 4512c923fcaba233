"""The base of every event, and the decoding of a log's lines. The kinds are in `kinds.py`.

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
"""Version of the event log, incremented when readers of the version before would misread a log."""
NOTE = "not_as_declared"
"""Field with the error of an event that was written although it is not as declared."""


JobTime = Annotated[float, Unit("s")]
"""Seconds of the monotonic clock of the coordinator's machine."""


class Event(Declared):
    """Something that happened to a job."""

    reader = "event log"
    was: ClassVar[tuple[str, ...]] = ()
    """Names of this kind in logs of earlier versions."""
    fields_were: ClassVar[Mapping[str, str]] = {}
    """Field names in logs of earlier versions, with the present name of each."""

    t: JobTime
    """Time: seconds of the monotonic clock of the coordinator's machine."""
    generation: Count | None = None
    """The writer's generation."""


class ByCoordinator(Event):
    """An event written by the coordinator."""

    sender = "coordinator"


class ByAgent(Event):
    """An event written by a node's agent."""

    sender = "agent"
    node: Count
    """The agent's node."""


class ByWorker(Event):
    """An event written by a rank's process."""

    sender = "worker"
    rank: Count
    """The rank."""


class Other(Event):
    """A line of a log that is no event of a known kind."""

    name: str
    why: str = ""
    """The error in the line; empty: its kind is of another version."""


E = TypeVar("E", bound=Event)


class Events(list[Event]):
    """Events in the order of their log. The index by kind is built once."""

    @cached_property
    def _by_kind(self) -> dict[type[Event], list[Any]]:
        found: dict[type[Event], list[Any]] = {}
        for event in self:
            found.setdefault(type(event), []).append(event)
        return found

    def of(self, kind: type[E]) -> list[E]:
        """All events of one kind."""
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
    """Every declared kind of event."""

    def __init__(self, kinds: Iterable[type[Event]]) -> None:
        known = list(kinds)
        super().__init__("event", "event", known)
        self._by_any_name = {name: kind for kind in known for name in (*kind.was, declared.name_of(kind, self.key))}

    def read(self, entry: Mapping[str, Any]) -> Event:
        """Return the event of a line, of this or an earlier version.

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
            return declared.read(kind, fields, str(name))  # of this version, like nearly all lines
        except WireError:
            return declared.read(kind, _known(kind, fields), str(name))


def _known(kind: type[Event], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared fields of the kind."""
    if kind.model_config.get("extra") == "allow":
        return {name: value for name, value in fields.items() if name != "event"}
    return {name: value for name, value in fields.items() if name in kind.model_fields and name != "event"}
