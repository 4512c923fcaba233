"""Steps of a release: each prints one line with its seconds, and the first that fails ends the release."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


class StepFailedError(Exception):
    """A step failed; the message says why."""


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Run the body, and print the title with the seconds it took.

    Raises:
        SystemExit: the body raised StepFailedError, whose message was printed.
    """
    began = time.monotonic()
    try:
        yield
    except StepFailedError as error:
        print(f"FAILED {time.monotonic() - began:6.1f} s  {title}\n{error}", flush=True)
        raise SystemExit(1) from None
    print(f"ok     {time.monotonic() - began:6.1f} s  {title}", flush=True)


def run(
    *command: str | Path, cwd: Path, environ: Mapping[str, str] = os.environ, code: int = 0, timeout_s: float = 900.0
) -> str:
    """Run a command, and return its stdout, followed by its stderr.

    Raises:
        StepFailedError: the exit code is not `code`, the output has a traceback, or the time is up.
    """
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise StepFailedError(f"`{shown}` took longer than {timeout_s:g} s") from None
    except FileNotFoundError as error:
        raise StepFailedError(f"`{shown}` cannot start: {error}") from None
    output = done.stdout + done.stderr
    if done.returncode != code:
        raise StepFailedError(f"`{shown}` exited with {done.returncode}, not {code}:\n{output}")
    if "Traceback (most recent call last)" in output:
        raise StepFailedError(f"`{shown}` printed a traceback:\n{output}")
    return output
