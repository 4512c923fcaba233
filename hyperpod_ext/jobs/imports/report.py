"""Result of an import, and a mapping that records which of its fields were read. Pure.

`Fields.rest` returns every field that the importer did not read, so that no importer drops a field silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.spec_annotation import without_defaults
from hyperpod_ext.jobs.contract.yaml_text import to_yaml
from hyperpod_ext.jobs.imports.shell_parts import shown

NOT_CARRIED = "is not carried: a spec has no such field"


@dataclass
class Imported:
    """The job imported from a file, and a sentence for each difference between the job and the file."""

    job: JobConfig
    target: str
    left_out: list[str] = field(default_factory=list)
    """Sentences about lost settings: parts of the file that the spec lacks or changes."""
    notes: list[str] = field(default_factory=list)
    """Sentences about harmless differences between the job and the file. For example, the rendered file writes a part
    of the imported file in another way, or a part of the imported file had no effect."""

    def written(self) -> dict[str, Any]:
        """Return the spec as a dictionary, with the fields that differ from their defaults or that the file sets."""
        return without_defaults(self.job, keep_set=True)

    def to_yaml(self) -> str:
        """Return the result of `written` as YAML."""
        return to_yaml(self.written()) + "\n"


@dataclass
class Report:
    """Sentences about an imported file, each with the file's name and, if known, the line."""

    source: str
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lost(self, text: str, line: int | None = None) -> None:
        """Add a sentence about a part of the file that the spec lacks or changes."""
        self.left_out.append(self._at(text, line))

    def note(self, text: str, line: int | None = None) -> None:
        """Add a sentence about a harmless difference between the job and the file."""
        self.notes.append(self._at(text, line))

    def unused(self, statements: Iterable[tuple[str, int]]) -> None:
        """Add a note for each statement of a shell script on which nothing in the spec depends."""
        for text, line in statements:
            self.note(f"{shown(text)}: is not carried: nothing in the spec depends on it", line)

    def _at(self, text: str, line: int | None) -> str:
        return f"{self.source}: {text}" if line is None else f"{self.source}:{line}: {text}"


class Fields:
    """A mapping in an imported file. Records which fields were read."""

    def __init__(self, data: Mapping[str, Any], document: Document, path: Path = (), used: set[Path] | None = None):
        self._data, self._document, self._path = data, document, path
        self._used: set[Path] = set() if used is None else used

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`, and mark the field and everything in it as read."""
        self._used.add((*self._path, name))
        return self._data.get(name, default)

    def take_all(self) -> dict[str, Any]:
        """Return the whole mapping, and mark all its fields as read."""
        self._used.add(self._path)
        return dict(self._data)

    def get(self, name: str) -> Any:
        """Return the value of the field `name` without marking the field as read."""
        return self._data.get(name)

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._data)

    def problem(self, name: str, message: str) -> Problem:
        """Return a problem of the field `name`, with the field's line in the file."""
        return self._document.problem((*self._path, name), message)

    def says(self, name: str, message: str) -> str:
        """Return a problem of the field `name` as a line of a report."""
        return str(self.problem(name, message))

    def below(self, name: str) -> Fields:
        """Return the mapping in the field `name`; an empty mapping if the field is missing.

        Raises:
            TypeError: the field's value is not a mapping.
        """
        found = self._data.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"{name} is not a mapping")
        return Fields(found or {}, self._document, (*self._path, name), self._used)

    def each(self, name: str) -> list[Fields]:
        """Return the mappings in the list of the field `name`."""
        found = self._data.get(name) or []
        return [Fields(one, self._document, (*self._path, name, at), self._used) for at, one in enumerate(found)]

    def rest(self) -> dict[str, Any]:
        """Return a copy of the mapping with only the unread fields. Lists in the copy have only their unread items."""
        return dict(self._unread(self._data, self._path) or {})

    def problems(self, message: str = NOT_CARRIED) -> Iterator[Problem]:
        """Yield a problem for each unread field, with the field's line in the file."""
        for path in self._leaves(self._data, self._path):
            yield self._document.problem(path, message)

    def _unread(self, value: Any, path: Path) -> Any:
        if path in self._used:
            return None
        if isinstance(value, Mapping):
            kept = {name: self._unread(below, (*path, name)) for name, below in value.items()}
            return {name: below for name, below in kept.items() if below is not None} or None
        if isinstance(value, list):
            return [
                one for at, below in enumerate(value) if (one := self._unread(below, (*path, at))) is not None
            ] or None
        return value

    def _leaves(self, value: Any, path: Path) -> Iterator[Path]:
        if path in self._used:
            return
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
        if items is None or not value:
            yield path
            return
        for name, below in items:
            yield from self._leaves(below, (*path, name))
