"""Input, output and errors of a process that was started with some of them closed, as after `command >&-`."""

import os
import sys


def open_standard_streams() -> None:
    """Open those that are closed, on nothing.

    Else the next file or socket would have such a number, and whatever is printed, or closed in a new process, would be
    its.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest number that is free
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))
