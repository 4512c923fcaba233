"""Reads YAML as plain data, and records the line of every value for error messages.

Scalars follow the YAML 1.2 core schema, as in editors: `on`, `no`, `1:30` and `2026-11-20` are text. The data consists
only of null, bool, int, float, str, list and dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from hyperpod_ext.errors import Problem

Path = tuple[str | int, ...]
"""Path of a value in a document, such as `("checkpoint", "tiers", 1, "every_steps")`."""

_PREFIX = "tag:yaml.org,2002:"
_MERGE = _PREFIX + "merge"
_WORDS = {
    "but found another document": "a second document starts here",
    "expected the node content, but found '<stream end>'": "the text ends in the middle of a value",
    "expected ',' or ']', but got '<stream end>'": "the file ends before a list in brackets is closed",
    "expected ',' or '}', but got '<stream end>'": "the file ends before a mapping in braces is closed",
}
_MOST_VALUES = 100_000
"""Maximum number of values in a document, more than any real spec has. The limit is needed because nested YAML aliases
can expand ten lines to billions of values."""
_LARGEST = 2**63 - 1
"""Largest whole number that Kubernetes, Slurm and SageMaker can read."""
_TOO_DEEP = "the YAML is nested too deeply to be read"
_LESS_DEEP = "use fewer levels of brackets, or of indent"
_SCALARS = {"null", "bool", "int", "float", "str"}


def dotted(path: Path) -> str:
    """Return `path` as text with dots between its parts, such as `checkpoint.tiers.1.every_steps`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Position of a value in a file or in a command-line option."""

    source: str
    """Name of the file, or the option as the user wrote it."""
    line: int | None = None
    """Line in the file `source`, counted from 1. None for an option."""
    text: str | None = None
    """The text of the value as it is written, if the value is a scalar; otherwise None."""


@dataclass
class Document:
    """The values of one YAML document, with the file and line of each value."""

    source: str
    data: object = None
    locations: dict[Path, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Mistakes in the YAML syntax, or in `--set` options."""

    def location(self, path: Path) -> SourceLocation:
        """Return the position of the value at `path`. If there is no such value, return the position of its nearest
        existing parent."""
        path = path if path in self.locations else self.path_of(dotted(path))
        for length in range(len(path), -1, -1):
            if found := self.locations.get(path[:length]):
                return found if length == len(path) else SourceLocation(found.source, found.line)
        return SourceLocation(self.source, 1)

    def path_of(self, text: str) -> Path:
        """Parse the dotted path `text`, in the format that `dotted` writes. A key may itself contain dots
        (`nvidia.com/gpu`), so the keys of this document decide where the path is split."""
        known = {dotted(path): path for path in self.locations}
        head, rest = text, ""
        while head and head not in known:
            head, _, last = head.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        return known.get(head, ()) + tuple(int(part) if part.isdecimal() else part for part in rest.split(".") if part)

    def problem(self, path: Path, message: str, hint: str = "") -> Problem:
        """Return a problem with the value at `path`, with the value's file and line."""
        place = self.location(path)
        return Problem(message, path=dotted(path), source=place.source, line=place.line, hint=hint)


def parse(text: str, source: str) -> Document:
    """Read the YAML in `text`. Mistakes are added to `problems` of the document, and the rest of the YAML is still
    read."""
    documents = _read(text, source, single=True)
    return documents[0] if documents else Document(source, {})


def parse_all(text: str, source: str) -> list[Document]:
    """Read every YAML document in `text`. Lines are counted from the start of `text`. Mistakes are added to `problems`
    of each document."""
    return _read(text, source, single=False)


def _read(text: str, source: str, *, single: bool) -> list[Document]:
    nodes: list[yaml.Node | None] = []
    try:
        loader = _Loader(text)
        try:
            if single:
                nodes.append(loader.get_single_node())
            while not single and loader.check_node():
                nodes.append(loader.get_node())
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        return [Document(source, problems=[_syntax_problem(error, text, source)])]
    except RecursionError:
        return [Document(source, problems=[Problem(_TOO_DEEP, source=source, hint=_LESS_DEEP)])]
    documents = [(Document(source), node) for node in nodes if node is not None]
    for document, node in documents:
        _fill(document, node)
    return [document for document, _ in documents]


def _fill(document: Document, node: yaml.Node) -> None:
    try:
        document.data = _Reader(document).read(node, (), node.start_mark.line + 1, ())
    except _TooManyValuesError:
        hint = "replace aliases by their values, or use fewer aliases"
        message = f"has more than {_MOST_VALUES:,} values after its aliases are expanded"
        document.data = None
        document.problems = [Problem(message, source=document.source, line=1, hint=hint)]
    except RecursionError:
        document.data = None
        document.problems = [Problem(_TOO_DEEP, source=document.source, hint=_LESS_DEEP)]


class _TooManyValuesError(Exception):
    """Raised if a document has too many values after its YAML aliases are expanded."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(f"(?:{_pattern})\\Z"), _first)


class _Reader:
    """Converts PyYAML nodes to plain data, and records the line of every value in the document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._values = 0

    def read(self, node: yaml.Node, path: Path, line: int, inside: tuple[int, ...]) -> object:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise _TooManyValuesError
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        self._document.locations[path] = SourceLocation(self._document.source, line, text)
        if id(node) in inside:
            self._report(line, path, "an anchor contains itself", "remove the alias inside its own anchor")
            return None
        inside = (*inside, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read(item, (*path, index), item.start_mark.line + 1, inside)
                for index, item in enumerate(node.value)
            ]
        return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: Path, inside: tuple[int, ...]) -> dict[str, object]:
        written: dict[str, int] = {}
        data: dict[str, object] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE:
                if not all(isinstance(source, yaml.MappingNode) for source in _sources(value)):
                    message = "can only merge mappings (`<<: *anchor`, or `<<: [*first, *second]`)"
                    self._report(line, (*path, "<<"), message, "put the anchor on a mapping")
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._report(line, path, "a field name must be a word, not a list or a mapping")
                continue
            name = key.value
            if name in written:
                hint = f"the first is on line {written[name]}; keep one of the two"
                self._report(line, (*path, name), "is written twice", hint)
                continue
            written[name] = line
            data[name] = self.read(value, (*path, name), line, inside)
        for key, value in _merged(node):
            if key.value not in data and id(value) not in inside:
                data[key.value] = self.read(value, (*path, key.value), key.start_mark.line + 1, inside)
        return data

    def _scalar(self, node: yaml.Node, path: Path, line: int) -> object:
        kind = node.tag.removeprefix(_PREFIX)
        if kind not in _SCALARS:
            self._report(line, path, f"the tag {node.tag} is not supported", "write the value without a tag")
            return None
        text: str = node.value
        try:
            return _value(kind, text)
        except ValueError as error:
            self._report(line, path, f"{text[:40]!r} cannot be read as {kind}: {error}")
            return None

    def _report(self, line: int, path: Path, message: str, hint: str = "") -> None:
        problem = Problem(message, path=dotted(path), source=self._document.source, line=line, hint=hint)
        self._document.problems.append(problem)


def _value(kind: str, text: str) -> object:
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if abs(number) > _LARGEST:
                raise ValueError(f"it is larger than {_LARGEST}, the largest number that Kubernetes can read")
            return number
        case "float":
            return float(text)
    text.encode()  # `encode` raises an error for an unpaired surrogate, which JSON cannot represent
    return text


def _merged(node: yaml.MappingNode, seen: set[int] | None = None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the fields that `<<: [*first, *second]` merges into a mapping, in the order of the list. If a field comes
    twice, the caller uses its first value; the mapping's own value comes before all merged values.

    Args:
        seen: ids of the mappings whose fields were yielded, because an anchor may merge itself or many others.
    """
    seen = {id(node)} if seen is None else seen
    for key, value in node.value:
        if key.tag != _MERGE:
            continue
        for source in _sources(value):
            if isinstance(source, yaml.MappingNode) and id(source) not in seen:
                seen.add(id(source))
                for name, its in source.value:
                    if isinstance(name, yaml.ScalarNode) and name.tag != _MERGE:
                        yield name, its
                yield from _merged(source, seen)


def _sources(merged: yaml.Node) -> list[yaml.Node]:
    return merged.value if isinstance(merged, yaml.SequenceNode) else [merged]


def _syntax_problem(error: yaml.YAMLError, text: str, source: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        line = min(mark.line, max(text.count("\n") - text.endswith("\n"), 0)) + 1
        detail = _WORDS.get(str(error.problem), str(error.problem)).replace("'<stream end>'", "the end of the text")
    else:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        detail = f"it contains the character U+{getattr(error, 'character', 0):04X}, which YAML does not allow"
    return Problem(f"is not YAML: {detail}", source=source, line=line, hint=_syntax_hint(detail, text, line))


def _syntax_hint(detail: str, text: str, line: int) -> str:
    lines = text.splitlines()
    written = lines[line - 1] if line <= len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return "indent with spaces, not tabs"
    if "mapping values" in detail:
        return "put text that contains a colon in quotes, and give fields of one group the same indent"
    if found := re.search("character U[+]([0-9A-F]{4})", detail):
        return f"remove the character; in a value that needs it, write \\u{found[1]} in double quotes"
    if "is closed" in detail:
        return f"add the missing `{']' if 'list' in detail else '}'}`"
    if "second document" in detail:
        return "keep one document in the file: remove this line and all following lines"
    return "check the quotes, brackets and indent of this line and of the line above"
