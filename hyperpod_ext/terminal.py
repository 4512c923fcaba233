"""Escapes control sequences in text from outside, such as names, manifests, exceptions and log lines.

The module needs only the standard library, because the command line, the code that submits jobs and the container
import it.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

_CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters C0 and C1, except tab and newline;
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # characters that change the direction of text;
    "\u2028\u2029\ud800-\udfff]"  # other line separators, and surrogates for bytes that are not UTF-8
)
_SHOWN = 120
"""Maximum number of characters that a message shows of a value from outside."""


def escape(text: str) -> str:
    """Return `text` with control characters escaped as in Python, such as `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def quote(value: object) -> str:
    """Return a value from outside as one short line for a message, with control characters escaped."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # `repr` fails for an integer of thousands of digits or deep nesting
        text = f"<{type(value).__name__}>"
    return escape(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class _Escaping:
    """A text stream that escapes control characters, and otherwise behaves like `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):  # click writes shell completions as bytes
            text = text.decode(errors="backslashreplace")
        self._stream.write(escape(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # hide `buffer`, to which writes would not be escaped
            raise AttributeError(name)
        return getattr(self._stream, name)


def escape_output() -> None:
    """Escape control characters in all later output of this process, including tracebacks. `drawing` returns a stream
    without escaping."""
    sys.stdout, sys.stderr = (_Escaping(drawing(stream)) for stream in (sys.stdout, sys.stderr))


def drawing(stream: TextIO) -> TextIO:
    """Return the stream without escaping that `stream` wraps, for progress bars and other terminal sequences."""
    return stream._stream if isinstance(stream, _Escaping) else stream
