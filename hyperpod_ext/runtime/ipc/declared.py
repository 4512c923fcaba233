"""Base class of all messages and events. Each kind of message or event is one strict pydantic model.

    class Listen(Declared):
        '''Serve other nodes on a port, and return it.'''

        sender, reader = "agent", "memory server"
        op: Literal["listen"] = "listen"
        host: str
        '''Address of this node.'''

A `Kinds` object is the set of message kinds that one reader accepts. A sender creates an instance of a kind and calls
`encode`. A reader calls `Kinds.decode`, which returns an instance whose fields have the declared types and ranges, or
raises a `WireError` that names the kind and the invalid field. `declared_table.py` generates the tables in the docs.
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
"""Version of the protocol between the processes of a job, which must be incremented with every change of a declared
kind."""

_LONGEST_S = 1e9
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class Declared(BaseModel):
    """One kind of message or event. The docstring of the class describes the kind. The docstring below a field
    describes that field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    sender: ClassVar[str] = ""
    """Process that sends a message of this kind, or writes an event of this kind."""
    reader: ClassVar[str] = ""
    """Process that reads messages or events of this kind."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Annotation of a numeric field with the unit of the number."""

    name: str


T = TypeVar("T")
D = TypeVar("D", bound=Declared)

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count, step, rank or generation: at least 0, and at most 63 bits, so that it fits a 64-bit integer in other
languages."""
Bytes = Annotated[int, Field(ge=0, lt=1 << 63), Unit("bytes")]
Seconds = Annotated[float, Field(ge=0, le=_LONGEST_S), Unit("s")]
"""A duration in seconds, of at most about thirty years. Every function of the operating system accepts durations up to
thirty years."""
Port = Annotated[int, Field(ge=0, lt=1 << 16)]
Listed = Annotated[tuple[T, ...], Strict(False)]
"""A JSON list."""
Address = Annotated[tuple[str, Port], Strict(False)]
"""Host name or IP address, and port number."""
ByNumber = dict[Annotated[int, Field(ge=0, lt=1 << 63), Strict(False)], T]
"""A JSON object whose keys are node numbers or rank numbers."""


def encode(message: Declared) -> Message:
    """Return the message as a dict that `json.dumps` accepts. Tuples and numeric keys are not converted, because
    `json.dumps` converts them to lists and text.

    The JSON mode of pydantic is not used, because it replaces infinite numbers in fields of type `Any` by null.
    """
    return message.model_dump()


def read(kind: type[D], message: Mapping[str, Any], name: str) -> D:
    """Return the instance of `kind` that the JSON object `message` describes. `name`: name of the message in errors.

    Raises:
        WireError: a field is missing, unknown or invalid.
    """
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        raise WireError(f"{name}: {_first(error)}") from None


class Kinds(Generic[D]):
    """The set of message kinds that one reader accepts. `key`: the field of a message that contains its kind.
    `what`: description of the messages for errors, such as "order to a worker"."""

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
    """Build the pydantic validators of all imported kinds, so that processes forked from this process need not build
    them."""
    for kind in of.__subclasses__():
        kind.model_rebuild()
        build_all(kind)


def name_of(kind: type[Declared], key: str) -> str:
    """Return the name of a kind as it appears in messages, in field `key`."""
    return str(kind.model_fields[key].default)


def fields_of(kind: type[Declared]) -> dict[str, Any]:
    """Return a map from the name of each field of `kind` to its declared type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def with_version(message: Message) -> Message:
    """Return the first message on a connection with the protocol version added."""
    return {**message, "protocol": PROTOCOL}


def checked_version(message: Message, reader: str, sender: str) -> Message:
    """Check the protocol version in the peer's first message, and return the message without the version.

    Raises:
        WireError: the peer has another protocol version, or sent none.
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
    """Return a description of the first invalid field in a validation error."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    match problem["type"]:
        case "missing":
            return f"field `{where}` is missing"
        case "extra_forbidden":
            return f"field `{where}` is unknown"
    expected = problem["msg"].removeprefix("Input ").replace("tuple", "list").replace("dictionary", "object")
    return f"field `{where}` {expected}, not {_short.repr(problem['input'])}"
