"""The base of everything that goes over a wire or into a log: one strict model for each kind.

    class Listen(Declared):
        '''The agent starts: other nodes are to reach this memory server.'''

        sender, reader = "agent", "memory server"
        op: Literal["listen"] = "listen"
        host: str
        '''Address of this node.'''

A `Kinds` is the set of kinds that one reader takes. Senders make an instance and `encode` it; readers `decode`, and get
an instance whose fields have the declared types and ranges, or a `WireError` that names kind and field. The table for
the docs is made in `declared_table.py`.
"""

from __future__ import annotations

import reprlib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from hyperpod_ext.runtime.ipc.messages import Message, WireError

PROTOCOL = 4
"""Version of all that our processes say to each other. It rises with every change of a declared kind."""

_LONGEST_S = 1e9
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class Declared(BaseModel):
    """One kind. The docstring says when it is sent; a docstring under a field, what the field means."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    sender: ClassVar[str] = ""
    """Who sends or writes it."""
    reader: ClassVar[str] = ""
    """Who reads it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts."""

    name: str


T = TypeVar("T")
D = TypeVar("D", bound=Declared)

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number, step, rank, generation: 0 or more, and no more than other languages can hold."""
Bytes = Annotated[int, Field(ge=0, lt=1 << 63), Unit("bytes")]
Seconds = Annotated[float, Field(ge=0, le=_LONGEST_S), Unit("s")]
"""A duration; thirty years at most, so that every clock and every wait can be given it."""
Port = Annotated[int, Field(ge=0, lt=1 << 16)]
Listed = Annotated[tuple[T, ...], Strict(False)]
"""A JSON list."""
Address = Annotated[tuple[str, Port], Strict(False)]
"""Host and port."""
ByNumber = dict[Annotated[int, Field(ge=0, lt=1 << 63), Strict(False)], T]
"""A JSON object whose keys are numbers, of nodes or ranks."""


def encode(message: Declared) -> Message:
    """The object that says it, for `json.dumps`, which makes lists of tuples and text of keys that are numbers.

    pydantic could do that, too, and would make null of what is not a finite number in a free-form field.
    """
    return message.model_dump()


def read(kind: type[D], message: Mapping[str, Any], name: str) -> D:
    """The instance that a JSON object says. `name` stands for it in errors.

    Raises:
        WireError: a field is missing, unknown or wrong.
    """
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        raise WireError(f"{name}: {_first(error)}") from None


class Kinds(Generic[D]):
    """The kinds that one reader takes, told apart by the field `key`. `what`: one of them, for errors and docs."""

    def __init__(self, what: str, key: str, kinds: Iterable[type[D]]) -> None:
        self.what, self.key = what, key
        self._by_name: dict[object, type[D]] = {name_of(kind, key): kind for kind in kinds}

    def __iter__(self) -> typing.Iterator[type[D]]:
        return iter(self._by_name.values())

    def decode(self, message: Mapping[str, Any]) -> D:
        """The instance that a JSON object says.

        Raises:
            WireError: no kind has that name, or a field is missing, unknown or wrong.
        """
        name = message.get(self.key)
        kind = self._by_name.get(name) if isinstance(name, str) else None
        if kind is None:
            raise WireError(f"{_short.repr(name)} is no {self.what}")
        return read(kind, message, str(name))


def build_all(of: type[Declared] = Declared) -> None:
    """Build what checks each kind that has been imported, so that processes that are forked from this one need not."""
    for kind in of.__subclasses__():
        kind.model_rebuild()
        build_all(kind)


def name_of(kind: type[Declared], key: str) -> str:
    """By what a kind is known on the wire."""
    return str(kind.model_fields[key].default)


def fields_of(kind: type[Declared]) -> dict[str, Any]:
    """Each field's type as it is declared."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def with_version(message: Message) -> Message:
    """The first message of one side, which tells the version that it speaks."""
    return {**message, "protocol": PROTOCOL}


def checked_version(message: Message, reader: str, sender: str) -> Message:
    """The other side's first message, without its version.

    Raises:
        WireError: the other side speaks another version.
    """
    fields = dict(message)
    theirs = fields.pop("protocol", None)
    if theirs != PROTOCOL:
        version = "none" if theirs is None else _short.repr(theirs)
        raise WireError(
            f"{reader} speaks version {PROTOCOL} of the job's protocol, {sender} version {version}: "
            "start all nodes from one image"
        )
    return fields


def _first(error: ValidationError) -> str:
    """What is wrong with the first field that is."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    match problem["type"]:
        case "missing":
            return f"field `{where}` is missing"
        case "extra_forbidden":
            return f"field `{where}` is unknown"
    expected = problem["msg"].removeprefix("Input ").replace("tuple", "list").replace("dictionary", "object")
    return f"field `{where}` {expected}, not {_short.repr(problem['input'])}"
