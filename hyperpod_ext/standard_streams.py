"""Keeps the standard streams open, and prevents writes to standard streams from raising."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _LossyFile(io.FileIO):
    """An output file that drops text instead of raising if a write fails, for example because the disk is full."""

    _lost, _why = 0, ""
    """Number of bytes that were dropped since the last successful write, and the error of the failed write."""

    def write(self, data: Any) -> int:
        """Write `data`, or count its bytes as lost if the write fails. The first successful write after failed writes
        also writes a message with the number of lost bytes."""
        try:
            if self._lost:
                super().write(f"\nhyperpod_ext: {self._lost} bytes of output were lost here: {self._why}\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            self._lost, self._why = self._lost + len(data), error.strerror or str(error)
            return len(data)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, for example by `command >&-` in the shell.

    If a stream stayed closed, the next file or socket that is opened would get the stream's descriptor and output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel assigns the lowest free number, which is `descriptor`
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def lose_unwritable_output() -> None:
    """Prevent `print` from raising in this process and its forks, so that a full disk does not end a job."""
    open_standard_streams()
    sys.stdout = sys.__stdout__ = _lossy(sys.stdout)  # type: ignore[assignment,misc]  # `__stdout__` is typed as final
    sys.stderr = sys.__stderr__ = _lossy(sys.stderr)  # type: ignore[assignment,misc]


def _lossy(stream: Any) -> TextIO:
    stream.flush()
    file = _LossyFile(stream.fileno(), "wb", closefd=False)
    file.name = stream.name
    by_line, at_once = stream.line_buffering, stream.write_through  # `at_once` is True with PYTHONUNBUFFERED
    buffered: Any = file if at_once else io.BufferedWriter(file)
    return io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=by_line, write_through=at_once)
