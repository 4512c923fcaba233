"""Escapes control sequences in foreign text, such as names, manifests, exceptions and log lines.

Standard library only; shared by the command line, the laptop side and the container.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

_CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1, but for tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction of text
    "\u2028\u2029\ud800-\udfff]"  # other ends of lines, and bytes of a name that are no text
)
_SHOWN = 120
"""Most characters of a foreign value in a message."""


def escape(text: str) -> str:
    """Return `text` with control characters escaped as in Python, such as `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def quote(value: object) -> str:
    """Return a foreign value as one short line for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deep
        text = f"<{type(value).__name__}>"
    return escape(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class _Escaping:
    """A text stream that escapes control characters, and otherwise behaves like `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):  # as click prints completions
            text = text.decode(errors="backslashreplace")
        self._stream.write(escape(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # it would bypass the escaping
            raise AttributeError(name)
        return getattr(self._stream, name)


def escape_output() -> None:
    """Escape all later output of this process, tracebacks included. `drawing` returns the plain stream."""
    sys.stdout, sys.stderr = (_Escaping(drawing(stream)) for stream in (sys.stdout, sys.stderr))


def drawing(stream: TextIO) -> TextIO:
    """Return the stream without escaping, for progress bars and other terminal sequences."""
    return stream._stream if isinstance(stream, _Escaping) else stream
