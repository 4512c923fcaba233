"""Base class of all messages and events. Each kind is one strict model.

    class Listen(Declared):
        '''Serve other nodes on a port, and return it.'''

        sender, reader = "agent", "memory server"
        op: Literal["listen"] = "listen"
        host: str
        '''Address of this node.'''

A `Kinds` is the set of kinds that one reader accepts. Senders make an instance and `encode` it. Readers `decode` the
message, and get an instance whose fields have the declared types and ranges, or a `WireError` that names kind and
field. `declared_table.py` generates the tables in the docs.
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
"""Version of all messages between our processes. Increment it with every change of a declared kind."""

_LONGEST_S = 1e9
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class Declared(BaseModel):
    """One kind of message or event. The class docstring describes the kind; the docstring below a field describes the
    field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    sender: ClassVar[str] = ""
    """Process that sends a message of this kind, or writes an event of this kind."""
    reader: ClassVar[str] = ""
    """Process that reads it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number."""

    name: str


T = TypeVar("T")
D = TypeVar("D", bound=Declared)

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count, step, rank or generation: at least 0, and within 64 bits for readers in other languages."""
Bytes = Annotated[int, Field(ge=0, lt=1 << 63), Unit("bytes")]
Seconds = Annotated[float, Field(ge=0, le=_LONGEST_S), Unit("s")]
"""A duration in seconds, of at most thirty years, which every function of the operating system accepts."""
Port = Annotated[int, Field(ge=0, lt=1 << 16)]
Listed = Annotated[tuple[T, ...], Strict(False)]
"""A JSON list."""
Address = Annotated[tuple[str, Port], Strict(False)]
"""Host and port."""
ByNumber = dict[Annotated[int, Field(ge=0, lt=1 << 63), Strict(False)], T]
"""A JSON object whose keys are numbers of nodes or ranks."""


def encode(message: Declared) -> Message:
    """Return the message as a dict for `json.dumps`, which converts tuples to lists and numeric keys to text.

    pydantic's own JSON mode is not used, because it replaces infinite numbers in free-form fields by null.
    """
    return message.model_dump()


def read(kind: type[D], message: Mapping[str, Any], name: str) -> D:
    """Return the instance that a JSON object describes. `name`: name of the message in errors.

    Raises:
        WireError: a field is missing, unknown or invalid.
    """
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        raise WireError(f"{name}: {_first(error)}") from None


class Kinds(Generic[D]):
    """The kinds that one reader accepts, distinguished by field `key`. `what`: name of such a message in errors."""

    def __init__(self, what: str, key: str, kinds: Iterable[type[D]]) -> None:
        self.what, self.key = what, key
        self._by_name: dict[object, type[D]] = {name_of(kind, key): kind for kind in kinds}

    def __iter__(self) -> typing.Iterator[type[D]]:
        return iter(self._by_name.values())

    def decode(self, message: Mapping[str, Any]) -> D:
        """Return the instance that a JSON object describes.

        Raises:
            WireError: no kind has this name, or a field is missing, unknown or invalid.
        """
        name = message.get(self.key)
        kind = self._by_name.get(name) if isinstance(name, str) else None
        if kind is None:
            raise WireError(f"{_short.repr(name)} is no {self.what}")
        return read(kind, message, str(name))


def build_all(of: type[Declared] = Declared) -> None:
    """Build the validators of all imported kinds, so that processes forked from this one need not build them."""
    for kind in of.__subclasses__():
        kind.model_rebuild()
        build_all(kind)


def name_of(kind: type[Declared], key: str) -> str:
    """Return the name of a kind as it appears in messages."""
    return str(kind.model_fields[key].default)


def fields_of(kind: type[Declared]) -> dict[str, Any]:
    """Return the declared type of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def with_version(message: Message) -> Message:
    """Return a connection's first message, with the version of the protocol added."""
    return {**message, "protocol": PROTOCOL}


def checked_version(message: Message, reader: str, sender: str) -> Message:
    """Return the peer's first message without the version of the protocol.

    Raises:
        WireError: the peer has another version.
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
    """Return the error of the first invalid field."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    match problem["type"]:
        case "missing":
            return f"field `{where}` is missing"
        case "extra_forbidden":
            return f"field `{where}` is unknown"
    expected = problem["msg"].removeprefix("Input ").replace("tuple", "list").replace("dictionary", "object")
    return f"field `{where}` {expected}, not {_short.repr(problem['input'])}"
