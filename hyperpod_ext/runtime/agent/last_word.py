"""The last message of an agent: in its output, and on Kubernetes in the status of its pod."""

from __future__ import annotations

import contextlib
import os
import sys

from hyperpod_ext.config.last_word import HINT, OF_JOB, OF_NODE

ENV_FILE = "HPX_TERMINATION_LOG"
"""Variable with the file of a container's last message, if the pod names another one."""
_FILE = "/dev/termination-log"
_MOST_BYTES = 4096
"""Kubernetes keeps no more."""


def say(words: str) -> None:
    print(f"hyperpod_ext agent, {words}", file=sys.stderr)  # noqa: T201  (its log keeps what is printed)


def of_failed_job(why: str, hint: str) -> str:
    """Return why the job failed, and keep it."""
    keep(why, hint)
    return "\n".join(filter(None, (why, hint))) or "the job failed; the report of the node that led it says why"


def keep(message: str, hint: str = "", node: int | None = None) -> None:
    """Write to the pod's status why the job failed, or why `node` had to stop. Empty: clear it."""
    head = OF_JOB if node is None else f"{OF_NODE} {node}: "
    text = head + message + (f"{HINT}{hint}" if hint else "") if message else ""
    with contextlib.suppress(OSError):  # there is no such file: this is no container of Kubernetes
        descriptor = os.open(os.environ.get(ENV_FILE, _FILE), os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode()[:_MOST_BYTES])
