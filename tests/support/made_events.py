"""Events for tests: a test says the fields that matter to it, the others get the plainest value of their type."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable
from typing import Any

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.ipc.declared import fields_of, name_of

_BY_NAME = {name_of(kind, "event"): kind for kind in KINDS}


def entry(t: float, event: str, **fields: Any) -> dict[str, Any]:
    """The JSON object of an event, as a log has it."""
    full = {**_plainest(event), "t": t, "event": event, **fields}
    KINDS.decode(full)
    return full


def made(t: float, event: str, **fields: Any) -> Event:
    """The event."""
    return KINDS.decode(entry(t, event, **fields))


def events_of(entries: Iterable[dict[str, Any]]) -> Events:
    """The events of JSON objects."""
    return Events(KINDS.decode(one) for one in entries)


@functools.cache
def _plainest(event: str) -> dict[str, Any]:
    """What must be said of such an event, at its plainest."""
    kind = _BY_NAME[event]
    return {name: _plain(its) for name, its in fields_of(kind).items() if kind.model_fields[name].is_required()}


def _plain(annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _plain(arguments[0])
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return None
    return [] if origin is tuple else (origin or annotation)()
