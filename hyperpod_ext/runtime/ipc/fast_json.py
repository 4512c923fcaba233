"""JSON of messages and events, many thousands a second: as Python's own module has it, several times faster."""

from __future__ import annotations

import json
from typing import Any

try:
    import pydantic_core
except ImportError:  # where torch alone is installed, as for `make test-gpu`
    pydantic_core = None  # type: ignore[assignment]

_PLAIN = json.JSONEncoder(separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    """`value` in one line of ASCII.

    Raises:
        TypeError, ValueError: it has no form in JSON.
    """
    try:
        text = pydantic_core.to_json(value) if pydantic_core else b""
        if text and text.isascii():
            return text
    except ValueError:  # half a surrogate pair, as names of files have for bytes that are no text
        pass
    return _PLAIN(value).encode()


def load(text: str | bytes | bytearray) -> Any:
    """The value that `text` is.

    Raises:
        ValueError, RecursionError: it is none.
    """
    try:
        return pydantic_core.from_json(text) if pydantic_core else json.loads(text)
    except ValueError:
        return json.loads(text)  # it may be half a surrogate pair; and its words say more of what is wrong
