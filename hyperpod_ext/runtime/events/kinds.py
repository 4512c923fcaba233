"""All kinds of events in a job's events.jsonl.

The coordinator, agents and workers write an event by its name and fields. `log.py` checks each event against its
declaration. The table in docs/events.md is generated from the declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from hyperpod_ext.runtime.events import of_checkpoints, of_faults, of_nodes, of_training
from hyperpod_ext.runtime.events.event import Event, EventKinds

THEMES = (of_training, of_faults, of_nodes, of_checkpoints)
"""Modules that declare kinds of events."""


def declared_in(module: ModuleType) -> Iterator[type[Event]]:
    """Yield the kinds of events that a module declares."""
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Event) and "event" in kind.model_fields:
            yield kind


KINDS = EventKinds(kind for module in THEMES for kind in declared_in(module))
