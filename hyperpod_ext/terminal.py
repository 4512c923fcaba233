"""Text from strangers, made harmless: names, manifests, exceptions and log lines may hold control sequences.

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
"""Characters of a stranger's value that a message shows."""


def escape(text: str) -> str:
    """`text` with control characters as Python writes them: `\\x1b` for the one that begins terminal sequences."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def quote(value: object) -> str:
    """A value from a stranger as one short line of a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deep
        text = f"<{type(value).__name__}>"
    return escape(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class _Escaping:
    """A text stream that escapes control characters; all else is the stream's own."""

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
        if name == "buffer":  # there is no way around
            raise AttributeError(name)
        return getattr(self._stream, name)


def escape_output() -> None:
    """Escape all that this process prints from here on, tracebacks included; `drawing` gets around it."""
    sys.stdout, sys.stderr = (_Escaping(drawing(stream)) for stream in (sys.stdout, sys.stderr))


def drawing(stream: TextIO) -> TextIO:
    """The stream for a program's own terminal sequences, as progress bars need them."""
    return stream._stream if isinstance(stream, _Escaping) else stream
