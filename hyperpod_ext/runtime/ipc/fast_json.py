"""Encodes and decodes JSON fast enough for many thousands of messages per second. Results are equal to those of the
`json` module."""

from __future__ import annotations

import json
from typing import Any

try:
    import pydantic_core
except ImportError:
    # pydantic_core is missing in environments that contain only torch, such as the environment of `make test-gpu`
    pydantic_core = None  # type: ignore[assignment]

_PLAIN = json.JSONEncoder(separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    """Return `value` as one line of ASCII JSON.

    Raises:
        TypeError, ValueError: JSON cannot represent `value`.
    """
    try:
        text = pydantic_core.to_json(value) if pydantic_core else b""
        if text and text.isascii():
            return text
    except ValueError:
        # `to_json` refuses unpaired surrogates, which represent undecodable bytes of file names in Python
        pass
    return _PLAIN(value).encode()


def load(text: str | bytes | bytearray) -> Any:
    """Return the value in a JSON text.

    Raises:
        ValueError, RecursionError: the text is not valid JSON.
    """
    try:
        return pydantic_core.from_json(text) if pydantic_core else json.loads(text)
    except ValueError:
        # try the `json` module, which accepts unpaired surrogates, and has clearer error messages
        return json.loads(text)
