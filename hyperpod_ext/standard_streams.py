"""Keeps standard streams open, and writes to them from raising."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _LossyFile(io.FileIO):
    """An output file that drops text on write errors, such as a full disk, instead of raising."""

    _lost, _why = 0, ""
    """Bytes lost since the last write, and the reason."""

    def write(self, data: Any) -> int:
        """Write `data`. The first write after a loss also reports the loss."""
        try:
            if self._lost:
                super().write(f"\nhyperpod_ext: {self._lost} bytes of output were lost here: {self._why}\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            self._lost, self._why = self._lost + len(data), error.strerror or str(error)
            return len(data)


def open_standard_streams() -> None:
    """Open closed standard streams on /dev/null, as after `command >&-`.

    Otherwise the next file or socket would get the number of a closed stream, and receive its output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest number that is free
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def lose_unwritable_output() -> None:
    """Keep `print` from raising in this process and its forks, so that a full disk does not end a job."""
    open_standard_streams()
    sys.stdout = sys.__stdout__ = _lossy(sys.stdout)  # type: ignore[assignment,misc]  # typed as if Python alone set them
    sys.stderr = sys.__stderr__ = _lossy(sys.stderr)  # type: ignore[assignment,misc]


def _lossy(stream: Any) -> TextIO:
    stream.flush()
    file = _LossyFile(stream.fileno(), "wb", closefd=False)
    file.name = stream.name
    by_line, at_once = stream.line_buffering, stream.write_through  # PYTHONUNBUFFERED asks for the latter
    buffered: Any = file if at_once else io.BufferedWriter(file)
    return io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=by_line, write_through=at_once)
